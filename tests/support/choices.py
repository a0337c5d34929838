"""Choices of experts beside those of a reference: counted, and imposed if wanted."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from estream.layers.observe import Rows


class Choices:
    """An observer. `agreed` of `all` (token, layer, expert) choices are the reference's too, whatever their order.

    reference: router logits [N, E] per MoE layer. impose: experts and gates follow from the reference's logits instead.
    """

    def __init__(self, layers: tuple[int, ...], reference: list[np.ndarray], top_k: int, *, impose: bool) -> None:
        self._reference = dict(zip(layers, reference, strict=True))
        self._top_k, self._impose = top_k, impose
        self.agreed = self.all = 0

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        if graph != "o_router":
            return
        expected = self._reference[layer]
        logits = arrays["logits"][:, : expected.shape[1]]
        own, wanted = (np.sort(np.argsort(-part, axis=1)[:, : self._top_k], axis=1) for part in (logits, expected))
        same = (own[:, :, None] == wanted[:, None, :]).any(axis=2)
        self.agreed += int(same.sum())
        self.all += same.size
        if self._impose:
            logits[...] = expected
