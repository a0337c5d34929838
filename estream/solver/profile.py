"""What a device can do, as the solver needs it: flash rates, and compute times of a package's shapes. Kept as JSON."""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from estream.errors import EStreamError, brief
from estream.package.dense import linears
from estream.package.reader import Package
from estream.version import __version__
from estream.whole_file import write_whole

FORMAT, VERSION = "estream-profile", 1
_HEAD_ELEMENTS = 2048 * 8192  # about which a slice of the head is
_NEXT_STEP = "Measure again: estream calibrate PACKAGE"

Points = tuple[tuple[float, float], ...]  # ascending (amount, seconds)


class ProfileError(EStreamError):
    """A device profile that cannot be read, or is of something else."""


@dataclass(frozen=True)
class Rate:
    """Direct reads of `nbytes` by each of `lanes` threads at a time: bytes per second, all together."""

    nbytes: int
    lanes: int
    bytes_per_s: float


@dataclass(frozen=True)
class Shape:
    """Times of one shape class on one target, seconds.

    panel: one tile of so many rows through one panel. dense: one layer's attention, norms, router and choice for a
    prompt of so many tokens. head_slice: one slice of the head for the last token. group_s: what a group costs beside
    its dispatches. panel_elements, dense_elements: weights of a matrix of a panel, and of a layer's projections.
    scaled: the times are another shape's, by the ratio of weights.
    """

    panel: Points
    dense: Points
    head_slice_s: float
    group_s: float
    panel_elements: int
    dense_elements: int
    scaled: bool = False

    def panel_s(self, rows: int) -> float:
        return interpolate(self.panel, rows)

    def dense_s(self, tokens: int) -> float:
        return interpolate(self.dense, tokens)

    def scaled_to(self, package: Package) -> Shape:
        """The times of a shape that was not measured, as far as numbers of weights tell."""
        panel, dense = shape_elements(package)
        by_panel, by_dense = panel / self.panel_elements, dense / self.dense_elements
        return Shape(
            tuple((rows, seconds * by_panel) for rows, seconds in self.panel),
            tuple((tokens, seconds * by_dense) for tokens, seconds in self.dense),
            self.head_slice_s * package.architecture.hidden * package.head_width / _HEAD_ELEMENTS,
            self.group_s,
            panel,
            dense,
            scaled=True,
        )


@dataclass(frozen=True)
class DeviceProfile:
    """machine: what the figures are of (`identify`). rates: of direct reads; lanes: the fewest that reach 95 % of the
    best rate. compute_slowdown, flash_slowdown: time of one while the other is busy over its time alone. base_bytes:
    the process with a package open, without its weights. shapes: by `shape_key`."""

    machine: Mapping[str, Any]
    rates: tuple[Rate, ...]
    lanes: int
    compute_slowdown: float
    flash_slowdown: float
    base_bytes: int
    shapes: Mapping[str, Shape] = field(default_factory=dict)

    def bytes_per_s(self, nbytes: int, lanes: int) -> float:
        """Of reads of `nbytes` by `lanes` threads, between the measured ones. Lanes that were not measured read as the
        nearest smaller number does, and reads smaller than the measured ones no faster than any of those."""
        known = sorted({rate.lanes for rate in self.rates})
        chosen = max((count for count in known if count <= lanes), default=known[0])
        points = sorted((rate.nbytes, rate.nbytes / rate.bytes_per_s) for rate in self.rates if rate.lanes == chosen)
        seconds = interpolate(points, nbytes)
        if nbytes < points[0][0]:  # where noise may let the line end below 0
            seconds = max(seconds, nbytes / max(amount / taken for amount, taken in points))
        return nbytes / seconds

    def shape(self, package: Package) -> Shape:
        """The package's shape, or else scaled from the measured one of the same scheme that is nearest in size.

        Raises ProfileError where there is none.
        """
        key = shape_key(package)
        if key in self.shapes:
            return self.shapes[key]
        scheme, (elements, _) = f"-{package.pool.panel.scheme}-{package.manifest.dense}-", shape_elements(package)
        alike = [shape for name, shape in self.shapes.items() if scheme in name]
        if not alike:
            raise ProfileError(
                "the device profile has no figures for this package's schemes",
                asked=f"experts {package.pool.panel.scheme}, dense {package.manifest.dense}",
                had=", ".join(sorted(self.shapes)) or "none",
                next_step=f"estream calibrate {package.path}",
            )
        return min(alike, key=lambda shape: abs(math.log(shape.panel_elements / elements))).scaled_to(package)

    def joined(self, other: DeviceProfile) -> DeviceProfile:
        """With the shapes of another profile of the same machine, where this one has none of its own."""
        return replace(self, shapes={**other.shapes, **self.shapes})

    def to_dict(self) -> dict[str, Any]:
        return {"format": FORMAT, "version": VERSION, **asdict(self)}

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole file or none. Raises UsageError where `path` is no regular file, OSError naming `path`."""
        Path(path).parent.mkdir(parents=True, exist_ok=True)
        write_whole(path, json.dumps(self.to_dict(), indent=1) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str]) -> DeviceProfile:
        """Raises ProfileError naming what is wrong, OSError where there is none."""
        text = Path(path).read_text(encoding="utf-8", errors="replace")
        try:
            raw = json.loads(text)
        except (ValueError, RecursionError) as problem:
            raise ProfileError(f"{path} is no device profile: {brief(str(problem))}", next_step=_NEXT_STEP) from problem
        return cls.from_dict(raw, str(path))

    @classmethod
    def from_dict(cls, raw: Any, where: str) -> DeviceProfile:
        """What `to_dict` gave. where: what an error names. Raises ProfileError."""
        try:
            if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
                raise ValueError(f"its format is not {FORMAT} of version {VERSION}")
            raw = {key: value for key, value in raw.items() if key not in ("format", "version")}
            raw["rates"] = tuple(Rate(**rate) for rate in raw["rates"])
            raw["shapes"] = {
                key: Shape(**{**value, "panel": _points(value["panel"]), "dense": _points(value["dense"])})
                for key, value in raw["shapes"].items()
            }
            return cls(**raw)
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise ProfileError(
                f"{where} is no device profile: {brief(str(problem))}", next_step=_NEXT_STEP
            ) from problem


def _points(raw: Sequence[Sequence[float]]) -> Points:
    points = tuple((float(amount), float(seconds)) for amount, seconds in raw)
    if not points or any(seconds < 0 for _, seconds in points) or [*points] != sorted(points):
        raise ValueError("points are not ascending amounts with times")
    return points


def interpolate(points: Sequence[tuple[float, float]], amount: float) -> float:
    """Straight lines between the points; beyond them the nearest line goes on, never below 0."""
    if len(points) == 1:
        return points[0][1] * amount / points[0][0]
    at = min(max(bisect_right([x for x, _ in points], amount), 1), len(points) - 1)
    (x0, y0), (x1, y1) = points[at - 1], points[at]
    return max(0.0, y0 + (y1 - y0) * (amount - x0) / (x1 - x0))


def shape_key(package: Package) -> str:
    """What compute times depend on: sizes and schemes of panels, attention and head."""
    arch, panel, attention = package.architecture, package.pool.panel, package.architecture.attention
    latent = f".{attention.latent.rank}" if attention.latent is not None else ""
    return (
        f"{arch.hidden}x{panel.width}-{panel.scheme}-{package.manifest.dense}-"
        f"{attention.heads}.{attention.kv_heads}.{attention.head_dim}{latent}-{arch.router_width}-{package.head_width}"
    )


def shape_elements(package: Package) -> tuple[int, int]:
    """(weights of a panel's matrix, weights of a layer's attention projections)."""
    arch = package.architecture
    matrices = linears(arch.attention, arch.hidden).values()
    return arch.hidden * package.pool.panel.width, sum(rows * columns for rows, columns in matrices)


def identify(backend: str, graphs: str, threads: int | None, path: Path) -> dict[str, Any]:
    """What a profile is valid for: machine, target, versions, and the device that `path` is on."""
    try:
        runtime = version("onnxruntime")
    except PackageNotFoundError:  # on a phone it is a library, not a package
        runtime = "unknown"
    return {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": f"{platform.system()} {platform.machine()}",
        "backend": backend,
        "graphs": graphs,
        "threads": threads,
        "estream": __version__,
        "onnxruntime": runtime,
        "device": os.stat(path).st_dev,
    }


def _processor() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(errors="replace").splitlines()
    except OSError:
        return platform.machine()
    named = (line.partition(":")[2].strip() for line in lines if line.startswith(("model name", "Hardware")))
    return next(named, platform.machine())


def profile_path(machine: Mapping[str, Any], cache: Path) -> Path:
    """Where the profile of a machine is kept in the user's cache."""
    key = hashlib.sha256(json.dumps(dict(machine), sort_keys=True).encode()).hexdigest()[:16]
    return cache / "profiles" / f"{machine['backend']}-{key}.json"


def load_profile(machine: Mapping[str, Any], cache: Path) -> DeviceProfile | None:
    """The cache's profile of this machine; None if there is none, or it cannot be read."""
    try:
        return DeviceProfile.read(profile_path(machine, cache))
    except (OSError, ProfileError):
        return None


def keep_profile(profile: DeviceProfile, cache: Path) -> tuple[DeviceProfile, Path]:
    """Writes it where `load_profile` finds it, with the shapes that were measured before. Raises OSError."""
    path, known = profile_path(profile.machine, cache), load_profile(profile.machine, cache)
    kept = profile if known is None else profile.joined(known)
    kept.write(path)
    return kept, path
