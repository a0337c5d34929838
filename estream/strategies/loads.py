"""How often each expert is chosen, measured once on a text: what static capacities are made from. Kept as JSON.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import UsageError, brief
from estream.package.manifest import MODEL
from estream.package.reader import Package
from estream.small_file import JSON_BYTES, read_json, read_small
from estream.whole_file import write_whole

FORMAT, VERSION = "estream-experts", 1
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
_NEXT_STEP = "Measure again: estream calibrate-experts PACKAGE --text F"
_ROUNDED = 1e-6  # counts are written in six decimals
_MOST = 1 << 53  # of a whole number: a float64 holds them all
_LAYER = re.compile(r"0|[1-9][0-9]{0,5}", re.ASCII)


@dataclass(frozen=True)
class PackageIdentity:
    """name: of the package's folder, to be shown. model_sha256: of its model.json, which has every file's checksum."""

    name: str
    model_sha256: str

    @classmethod
    def of(cls, package: Package) -> PackageIdentity:
        """Raises OSError."""
        content = read_small(package.path / MODEL, JSON_BYTES)
        return cls(Path(os.path.realpath(package.path)).name, hashlib.sha256(content).hexdigest())

    def __str__(self) -> str:
        return f"{self.name}, {self.model_sha256[:12]}"


@dataclass(frozen=True)
class ExpertLoads:
    """mean float64 [E], by MoE layer: rows per expert in a window of `window` tokens. quantiles float64
    [E, len(QUANTILES)]: of the same over the windows. popularity float64 [E]: share of all tokens that the expert was
    chosen for. seed, tokens: as asked, and as run. text_sha256: of the token ids."""

    package: PackageIdentity
    text_sha256: str
    seed: int
    tokens: int
    window: int
    mean: Mapping[int, np.ndarray]
    quantiles: Mapping[int, np.ndarray]
    popularity: Mapping[int, np.ndarray]

    @classmethod
    def measured(
        cls, package: Package, ids: np.ndarray, seed: int, window: int, counts: Mapping[int, np.ndarray]
    ) -> ExpertLoads:
        """counts: int64 [windows, E] by layer."""
        tokens = window * len(next(iter(counts.values())))
        return cls(
            PackageIdentity.of(package),
            hashlib.sha256(ids.astype("<i8").tobytes()).hexdigest(),
            seed,
            tokens,
            window,
            {layer: of.mean(axis=0) for layer, of in counts.items()},
            {layer: np.quantile(of, QUANTILES, axis=0).T for layer, of in counts.items()},
            {layer: of.sum(axis=0) / tokens for layer, of in counts.items()},
        )

    def load(self, layer: int, quantile: float) -> np.ndarray:
        """Rows per expert in a window that `quantile` of the windows stay within, float64 [E]; between the recorded
        quantiles on a straight line."""
        return np.array([np.interp(quantile, QUANTILES, expert) for expert in self.quantiles[layer]])

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready. Counts in six decimals."""
        layers = {
            str(layer): {
                "mean": self.mean[layer].round(6).tolist(),
                "quantiles": self.quantiles[layer].round(6).tolist(),
                "popularity": self.popularity[layer].round(6).tolist(),
            }
            for layer in self.mean
        }
        return {
            "format": FORMAT,
            "version": VERSION,
            "package": {"name": self.package.name, "model_sha256": self.package.model_sha256},
            "text_sha256": self.text_sha256,
            "seed": self.seed,
            "tokens": self.tokens,
            "window": self.window,
            "quantiles": list(QUANTILES),
            "layers": layers,
        }

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole file or none, the same bytes for the same loads. Raises UsageError, OSError."""
        write_whole(path, json.dumps(self.to_dict()) + "\n")

    @classmethod
    def read(cls, path: str | os.PathLike[str], package: Package) -> ExpertLoads:
        """The loads of `package`. Raises UsageError naming what is wrong, or both packages where they are another
        one's; OSError."""
        own = PackageIdentity.of(package)
        try:
            loads = cls._from(read_json(Path(path)))
            if own.model_sha256 == loads.package.model_sha256:
                loads._check(package)
                return loads
        except ValueError as problem:
            raise UsageError(f"--calibration {os.fspath(path)}: {problem}", next_step=_NEXT_STEP) from None
        raise UsageError(
            f"--calibration {os.fspath(path)} holds the expert loads of another package",
            asked=str(own),
            had=str(loads.package),
            next_step=f"estream calibrate-experts {package.path} --text F",
        )

    def _check(self, package: Package) -> None:
        """Raises ValueError, in words that can be shown, where the loads cannot be the package's."""
        pool, context = package.pool, package.architecture.context
        for layer in sorted(self.mean.keys() ^ set(pool.moe_layers)):
            what = "is missing" if layer in pool.moe_layers else "is no MoE layer of the package"
            raise ValueError(f"layer {layer} {what}")
        for layer, mean in self.mean.items():
            if len(mean) != pool.experts:
                raise ValueError(f"layer {layer} has {len(mean)} experts, in the package {pool.experts}")
        if self.window > context:
            raise ValueError(f"its window of {self.window} tokens is beyond the model's context of {context}")

    @classmethod
    def _from(cls, raw: Any) -> ExpertLoads:
        """Raises ValueError, in words that can be shown."""
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if type(raw.get("version")) is not int or raw["version"] != VERSION:
            raise ValueError(f"its version is {brief(raw.get('version'))}, not {VERSION}")
        if raw.get("quantiles") != list(QUANTILES):
            raise ValueError("its quantiles are other ones")
        window, seed = _whole(raw, "window", 1), _whole(raw, "seed", 0)
        tokens = _whole(raw, "tokens", 1)
        if tokens % window:
            raise ValueError(f"{tokens} tokens are not whole windows of {window}")
        package, layers = _object(raw, "package"), _object(raw, "layers")
        identity = PackageIdentity(_text(package, "name"), _text(package, "model_sha256"))
        found: dict[str, dict[int, np.ndarray]] = {"mean": {}, "quantiles": {}, "popularity": {}}
        for key in layers:
            if not _LAYER.fullmatch(key):
                raise ValueError(f"layers: {brief(key)} is no number of a layer")
            loads = _object({f"layer {key}": layers[key]}, f"layer {key}")
            found["mean"][int(key)] = _numbers(loads, "mean", f"layer {key}", window)
            found["quantiles"][int(key)] = _quantiles(loads, f"layer {key}", window)
            found["popularity"][int(key)] = _numbers(loads, "popularity", f"layer {key}", 1)
            if len({len(values[int(key)]) for values in found.values()}) > 1:
                raise ValueError(f"layer {key}: mean, quantiles and popularity are of different numbers of experts")
        return cls(identity, _text(raw, "text_sha256"), seed, tokens, window, **found)


def _whole(of: Mapping[str, Any], name: str, least: int) -> int:
    value = of.get(name)
    if type(value) is not int or not least <= value <= _MOST:
        raise ValueError(f"{name} must be a whole number of {least} to {_MOST}{_had(of, name)}")
    return value


def _text(of: Mapping[str, Any], name: str) -> str:
    value = of.get(name)
    if not isinstance(value, str):
        raise ValueError(f"{name} must be a text{_had(of, name)}")
    return value


def _object(of: Mapping[str, Any], name: str) -> dict[str, Any]:
    value = of.get(name)
    if not isinstance(value, dict):
        raise ValueError(f"{name} must be an object{_had(of, name)}")
    return value


def _had(of: Mapping[str, Any], name: str) -> str:
    return f", not {brief(of[name])}" if name in of else " and is missing"


def _numbers(of: Mapping[str, Any], name: str, where: str, most: int) -> np.ndarray:
    """float64 [E]."""
    value = of.get(name)
    # type(), not isinstance: true is no number of rows
    if not isinstance(value, list) or any(type(one) not in (int, float) or not 0 <= one <= most for one in value):
        raise ValueError(f"{where}: {name} must be a list of numbers from 0 to {most}")
    return np.array(value, np.float64)


def _quantiles(of: Mapping[str, Any], where: str, most: int) -> np.ndarray:
    """float64 [E, len(QUANTILES)]."""
    experts = of.get("quantiles")
    if not isinstance(experts, list):
        raise ValueError(f"{where}: quantiles must be a list for each expert")
    rows = [_numbers({"quantiles": one}, "quantiles", where, most) for one in experts]
    if any(len(row) != len(QUANTILES) for row in rows):
        raise ValueError(f"{where}: quantiles must be {len(QUANTILES)} for each expert")
    if any((np.diff(row) < -2 * _ROUNDED).any() for row in rows):
        raise ValueError(f"{where}: quantiles must not fall")
    return np.array(rows, np.float64).reshape(len(rows), len(QUANTILES))
