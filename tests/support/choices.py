"""Choices of experts beside those of a reference: counted, and imposed if wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from estream.layers.observe import Rows
from estream.models.choose import sigmoid


class Choices:
    """An observer. `agreed` of `all` (token, layer, expert) choices are the reference's too, whatever their order.

    reference: router logits [N, E] per MoE layer. biases: per MoE layer, what is added to sigmoid scores [E]; without,
    the logits themselves choose. impose: experts and gates follow from the reference's logits instead.
    """

    def __init__(
        self,
        layers: tuple[int, ...],
        reference: list[np.ndarray],
        top_k: int,
        *,
        impose: bool,
        biases: Sequence[np.ndarray] = (),
    ) -> None:
        self._reference = dict(zip(layers, reference, strict=True))
        self._biases = dict(zip(layers, biases, strict=True)) if biases else {}
        self._top_k, self._impose = top_k, impose
        self.agreed = self.all = 0

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        if graph != "o_router":
            return
        expected = self._reference[layer]
        logits = arrays["logits"][:, : expected.shape[1]]
        own, wanted = (
            np.sort(np.argsort(-self._scores(layer, part), axis=1)[:, : self._top_k], axis=1)
            for part in (logits, expected)
        )
        same = (own[:, :, None] == wanted[:, None, :]).any(axis=2)
        self.agreed += int(same.sum())
        self.all += same.size
        if self._impose:
            logits[...] = expected

    def _scores(self, layer: int, logits: np.ndarray) -> np.ndarray:
        """What the experts are chosen by."""
        return sigmoid(logits) + self._biases[layer] if layer in self._biases else logits
