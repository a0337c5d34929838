"""What a prefill returns."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from estream.layers.head import LogitsSink
from estream.telemetry.stats import PrefillStats


@dataclass(frozen=True)
class PrefillResult:
    """What a prefill returns.

    logits: float32 [V] of the last token (`logits="last"`), [N, V] (`"all"`), or None; hidden: float32 [N, H] after the
    final norm where asked for.
    """

    tokens: int
    logits: np.ndarray | None
    hidden: np.ndarray | None
    stats: PrefillStats
    configuration: dict[str, object]


def into(answer: np.ndarray) -> LogitsSink:
    """A sink that puts the pieces of logits into `answer`, float32 [R, V]."""

    def sink(row: int, column: int, block: np.ndarray) -> None:
        answer[row : row + block.shape[0], column : column + block.shape[1]] = block

    return sink
