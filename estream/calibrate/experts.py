"""How often a package's experts are chosen in a text: the engine's own prefills, watched."""

from __future__ import annotations

import numpy as np

from estream.engine import Engine
from estream.errors import UsageError
from estream.solver.load import LoadRecorder
from estream.strategies.loads import ExpertLoads

WINDOW = 512  # tokens


def text_windows(ids: np.ndarray, tokens: int | None, window: int, seed: int) -> np.ndarray:
    """int64 [windows, window]: whole windows of a text, at most `tokens` tokens, chosen by `seed`, in text order.

    A text shorter than a window is one window. Raises UsageError: fewer than 2 tokens in the text or asked for, or
    fewer asked than a window has.
    """
    if min(len(ids), tokens or 2) < 2:
        raise UsageError(
            "a calibration needs 2 tokens at least",
            had=min(len(ids), tokens or 2),
            next_step="Give a longer text, or a larger --tokens",
        )
    window = min(window, len(ids))
    found = ids[: len(ids) // window * window].reshape(-1, window)
    if tokens is None or tokens >= found.size:
        return found
    if tokens < window:
        raise UsageError(
            "--tokens is less than a window", asked=tokens, had=window, next_step="Give a smaller --window"
        )
    rows = np.random.default_rng(seed).permutation(len(found))[: tokens // window]
    return found[np.sort(rows)]


def measure_loads(engine: Engine, windows: np.ndarray, seed: int) -> ExpertLoads:
    """Prefills each of the windows, int64 [windows, tokens], and counts rows per expert. Raises as `Engine.prefill`."""
    pool = engine.package.pool
    counts = {layer: np.zeros((len(windows), pool.experts), np.int64) for layer in pool.moe_layers}
    for number, ids in enumerate(windows):
        recorder = LoadRecorder(pool)
        engine.prefill(ids, logits=None, observe=recorder)
        for layer, rows in recorder.counts.items():
            counts[layer][number] = rows
    return ExpertLoads.measured(engine.package, windows, seed, windows.shape[1], counts)
