"""How many tokens each expert gets: drawn at random, the same on every call, or as it was recorded."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path

import numpy as np

from estream.errors import UsageError, brief
from estream.layers.observe import Rows
from estream.package.layout import PoolLayout
from estream.small_file import read_json
from estream.whole_file import write_whole

_DISTINCT = 4  # layers that are drawn; the others repeat them


def draw_counts(
    experts: int, top_k: int, tokens: int, layers: int, *, skew: float = 0.0, seed: int = 0
) -> list[np.ndarray]:
    """Rows per expert, int64 [E] for each MoE layer. Every token takes top_k distinct experts, with weights
    rank^-skew (0: uniform, 1: Zipf), ranks shuffled per layer."""
    random = np.random.default_rng([seed, experts, top_k, tokens])
    drawn = []
    for _ in range(min(layers, _DISTINCT)):
        weights = random.permutation(np.arange(1, experts + 1, dtype=np.float64) ** -skew)
        scores = np.log(weights) + random.gumbel(size=(tokens, experts))
        chosen = np.argpartition(-scores, top_k - 1, axis=1)[:, :top_k]
        drawn.append(np.bincount(chosen.reshape(-1), minlength=experts))
    return [drawn[layer % len(drawn)] for layer in range(layers)]


def expected_coverage(experts: int, top_k: int, tokens: int) -> float:
    """The share of a layer's experts that a prompt needs, with uniform routing."""
    return 1.0 - (1.0 - top_k / experts) ** tokens


LOAD_FORMAT, LOAD_VERSION = "estream-load", 1


def read_load(path: Path, experts: int, top_k: int, layers: int, tokens: int) -> list[np.ndarray]:
    """Rows per expert of each MoE layer for a prompt of `tokens`, from a recorded load: JSON {"format": "estream-load",
    "version": 1, "tokens": N, "counts": [[rows of each expert] of each MoE layer]}. Of another length, in proportion.

    Raises UsageError naming what does not fit, OSError.
    """

    def refuse(what: str, asked: object = None, had: object = None) -> UsageError:
        next_step = "docs/simulation.md says how to record a load"
        return UsageError(f"--load {path}: {what}", asked=asked, had=had, next_step=next_step)

    try:
        raw = read_json(path)
    except ValueError as problem:
        raise refuse(str(problem)) from None
    if not isinstance(raw, dict) or raw.get("format") != LOAD_FORMAT or raw.get("version") != LOAD_VERSION:
        raise refuse(f"its format is not {LOAD_FORMAT} of version {LOAD_VERSION}")
    recorded, rows = raw.get("tokens"), raw.get("counts")
    if type(recorded) is not int or not 1 <= recorded < 1 << 53:
        raise refuse("tokens", asked="a whole number of at least 1", had=brief(recorded))
    if not isinstance(rows, list) or len(rows) != layers:
        raise refuse("counts", asked=f"{layers} MoE layers", had=len(rows) if isinstance(rows, list) else "no list")
    found = []
    for number, layer in enumerate(rows):
        if not isinstance(layer, list) or len(layer) != experts:
            raise refuse(f"counts of MoE layer {number}", asked=f"{experts} experts", had=brief(layer))
        if any(type(count) is not int or not 0 <= count <= recorded for count in layer):
            raise refuse(f"counts of MoE layer {number}", asked=f"whole numbers of 0 to {recorded}", had=brief(layer))
        if sum(layer) != recorded * top_k:
            expected = f"{recorded * top_k}: {recorded} tokens, {top_k} experts each"
            raise refuse(f"sum of the counts of MoE layer {number}", asked=expected, had=sum(layer))
        scaled = np.asarray(layer, np.float64) * tokens / recorded
        # An expert that had a token keeps one: which records are read must not hang on rounding.
        found.append(np.where(scaled > 0, np.maximum(np.rint(scaled), 1), 0).astype(np.int64))
    return found


class LoadRecorder:
    """An observer of one prefill (`estream.layers.observe`) that counts rows per expert, for `read_load`."""

    def __init__(self, pool: PoolLayout) -> None:
        self._pool = pool
        self.counts = {layer: [0] * pool.experts for layer in pool.moe_layers}
        self.tokens = 0

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        if graph == "input":
            self.tokens = len(arrays["hidden"])
        elif graph == "expert" and panel is not None and panel % self._pool.panels_per_expert == 0:
            self.counts[layer][panel // self._pool.panels_per_expert] += len(arrays["y"])

    def write(self, path: str | os.PathLike[str]) -> None:
        """Writes the whole file or none. Raises UsageError where `path` is no regular file, OSError."""
        counts = [self.counts[layer] for layer in self._pool.moe_layers]
        load = {"format": LOAD_FORMAT, "version": LOAD_VERSION, "tokens": self.tokens, "counts": counts}
        write_whole(path, json.dumps(load) + "\n")
