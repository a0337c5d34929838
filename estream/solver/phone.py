"""Profiles of phones that are not at hand: data files of published and fitted figures, each with its source.

A file is JSON, `phones/NAME.json`: what the phone is, whether its figures were fitted to published times, and
`figures`: {"value", "unit", "source"} by name, those of `Phone` and the flash curve.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Any

from estream.errors import UsageError, brief
from estream.solver.profile import DeviceProfile, ProfileError, Rate

FORMAT, VERSION = "estream-phone", 1
_CURVES = ("flash_by_size", "flash_by_lanes")  # shares of flash_bytes_per_s by bytes of a read, by reads at a time
_UNITS = {
    "matrix_flops": "1/s",
    "latent_flops": "1/s",
    "vector_bytes_per_s": "B/s",
    "ddr_bytes_per_s": "B/s",
    "dispatch_s": "s",
    "row_reads_bytes_per_s": "B/s",
    "flash_bytes_per_s": "B/s",
    "compute_slowdown": "1",
    "flash_slowdown": "1",
    "base_bytes": "B",
}


@dataclass(frozen=True)
class Phone:
    """matrix_flops: operations of matrix products, attention's among them. latent_flops: of the scores and sums of
    latent attention. vector_bytes_per_s: what passes through vector registers, read and written. ddr_bytes_per_s: of
    the NPU's own transfers. dispatch_s: a graph call, whatever it computes. row_reads_bytes_per_s: reads of one
    embedding row each. flash_bytes_per_s: of large reads, at the best number of them; by_size, by_lanes: shares of it,
    ascending.
    compute_slowdown, flash_slowdown, base_bytes: as in `DeviceProfile`. machine: what the figures are of."""

    machine: Mapping[str, Any]
    matrix_flops: float
    latent_flops: float
    vector_bytes_per_s: float
    ddr_bytes_per_s: float
    dispatch_s: float
    row_reads_bytes_per_s: float
    flash_bytes_per_s: float
    flash_by_size: Mapping[int, float]
    flash_by_lanes: Mapping[int, float]
    compute_slowdown: float
    flash_slowdown: float
    base_bytes: int

    @property
    def profile(self) -> DeviceProfile:
        """Its flash and memory, as the predictor takes those of a measured machine; no shapes."""
        rates = tuple(
            Rate(nbytes, lanes, self.flash_bytes_per_s * by_size * by_lanes)
            for lanes, by_lanes in self.flash_by_lanes.items()
            for nbytes, by_size in self.flash_by_size.items()
        )
        best = max(self.flash_by_lanes.values())
        lanes = min(lanes for lanes, share in self.flash_by_lanes.items() if share >= 0.95 * best)
        return DeviceProfile(self.machine, rates, lanes, self.compute_slowdown, self.flash_slowdown, self.base_bytes)


def phones() -> tuple[str, ...]:
    """Names of the phones whose profiles are here, sorted."""
    files = resources.files(__package__).joinpath("phones").iterdir()
    return tuple(sorted(entry.name.removesuffix(".json") for entry in files if entry.name.endswith(".json")))


def load_phone(name: str) -> Phone:
    """Raises UsageError listing the phones that are known, ProfileError naming what is wrong with a file."""
    if name not in phones():
        raise UsageError("unknown device", asked=brief(name), had=", ".join(phones()))
    return read_phone(name, resources.files(__package__).joinpath("phones", f"{name}.json").read_text("utf-8"))


def read_phone(name: str, text: str) -> Phone:
    """A phone's file. Raises ProfileError naming the figure that is missing, has no source or makes no sense."""

    def refuse(what: str) -> ProfileError:
        return ProfileError(f"{name} is no profile of a phone: {what}", next_step="See docs/simulation.md")

    try:
        raw = json.loads(text)
    except ValueError as problem:
        raise refuse(str(problem)) from problem
    if not isinstance(raw, dict) or raw.get("format") != FORMAT or raw.get("version") != VERSION:
        raise refuse(f"its format is not {FORMAT} of version {VERSION}")
    figures, machine = raw.get("figures"), raw.get("machine")
    if not isinstance(figures, dict) or set(figures) != {*_UNITS, *_CURVES} or not isinstance(machine, dict):
        raise refuse(f"it must have a machine and the figures {', '.join([*_UNITS, *_CURVES])}")
    values: dict[str, Any] = {}
    for key, figure in figures.items():
        if not isinstance(figure, dict) or set(figure) != {"value", "unit", "source"}:
            raise refuse(f"{key} must have value, unit and source")
        if not isinstance(figure["source"], str) or len(figure["source"]) < 10:
            raise refuse(f"{key} has no source")
        if figure["unit"] != _UNITS.get(key, "1"):
            raise refuse(f"{key} is in {figure['unit']!r}")
        value = figure["value"]
        if key in _CURVES:
            if not isinstance(value, dict) or not value or not all(map(_is_share, value.items())):
                raise refuse(f"{key} must be shares by whole numbers")
            values[key] = dict(sorted((int(at), share) for at, share in value.items()))
        elif not _positive(value):
            raise refuse(f"{key} must be a positive number")
        else:
            values[key] = value
    told = {"device": name, **machine}
    return Phone(machine=told, **{**values, "base_bytes": int(values["base_bytes"])})


def _is_share(point: tuple[str, object]) -> bool:
    at, share = point
    return at.isdecimal() and int(at) > 0 and _positive(share) and share <= 1  # type: ignore[operator]


def _positive(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value > 0
