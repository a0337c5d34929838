"""How often each expert is chosen, measured once on a text: what static capacities are made from. Kept as JSON.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import EStreamError, UsageError, brief
from estream.package.manifest import MODEL
from estream.package.reader import Package
from estream.small_file import JSON_BYTES, read_small
from estream.whole_file import write_whole

FORMAT, VERSION = "estream-experts", 1
QUANTILES = (0.0, 0.1, 0.25, 0.5, 0.75, 0.8, 0.85, 0.9, 0.95, 0.99, 1.0)
_NEXT_STEP = "Measure again: estream calibrate-experts PACKAGE --text F"


class LoadsError(EStreamError):
    """A file of expert loads that cannot be read, or is none."""


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

    def check(self, package: Package, path: str | os.PathLike[str]) -> None:
        """Raises UsageError naming both packages where the loads are another one's."""
        own = PackageIdentity.of(package)
        if own.model_sha256 != self.package.model_sha256:
            raise UsageError(
                f"{os.fspath(path)} holds the expert loads of another package",
                asked=str(own),
                had=str(self.package),
                next_step=f"estream calibrate-experts {package.path} --text F",
            )

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
    def read(cls, path: str | os.PathLike[str]) -> ExpertLoads:
        """Raises LoadsError naming what is wrong."""
        try:
            raw = json.loads(read_small(Path(path), JSON_BYTES))
            return cls._from(raw)
        except OSError as problem:
            raise LoadsError(f"{os.fspath(path)}: {problem.strerror}", next_step=_NEXT_STEP) from problem
        except (ValueError, TypeError, KeyError, AttributeError, RecursionError) as problem:
            raise LoadsError(
                f"{os.fspath(path)} holds no expert loads: {brief(str(problem))}", next_step=_NEXT_STEP
            ) from problem

    @classmethod
    def _from(cls, raw: Any) -> ExpertLoads:
        if not isinstance(raw, dict) or raw.get("format") != FORMAT:
            raise ValueError(f"its format is not {FORMAT}")
        if raw.get("version") != VERSION:
            raise ValueError(f"its version is {brief(raw.get('version'))}, not {VERSION}")
        if raw["quantiles"] != list(QUANTILES):
            raise ValueError("its quantiles are other ones")
        found: dict[str, dict[int, np.ndarray]] = {"mean": {}, "quantiles": {}, "popularity": {}}
        for layer, loads in raw["layers"].items():
            experts = len(loads["mean"])
            for name, values in found.items():
                array = np.array(loads[name], np.float64)
                shape = (experts, len(QUANTILES)) if name == "quantiles" else (experts,)
                if array.shape != shape or not np.isfinite(array).all() or (array < 0).any():
                    raise ValueError(f"layer {layer}: {name} is no {list(shape)} of loads")
                values[int(layer)] = array
        window = int(raw["window"])
        if window < 1:
            raise ValueError("its window is empty")
        identity = PackageIdentity(str(raw["package"]["name"]), str(raw["package"]["model_sha256"]))
        return cls(identity, str(raw["text_sha256"]), int(raw["seed"]), int(raw["tokens"]), window, **found)
