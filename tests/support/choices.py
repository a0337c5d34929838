"""Choices of experts beside those of a reference: counted, and imposed if wanted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np

from estream.layers.observe import Rows
from estream.models.base import Family


class Choices:
    """An observer. `agreed` of `all` (token, layer, expert) choices are the reference's too, whatever their order.

    reference: router logits [N, E] per MoE layer, without biases. biases: per MoE layer, what `Family.route` takes
    beside them. impose: experts and gates follow from the reference's logits instead.
    """

    def __init__(
        self, family: Family, reference: list[np.ndarray], *, impose: bool, biases: Sequence[np.ndarray] = ()
    ) -> None:
        layers = family.architecture().moe_layers
        self._family, self._impose = family, impose
        self._reference = dict(zip(layers, reference, strict=True))
        self._biases = dict(zip(layers, biases, strict=True)) if biases else {}
        self.agreed = self.all = 0

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        if graph != "o_router":
            return
        logits, expected = arrays["logits"], np.array(arrays["logits"])
        expected[:, : self._reference[layer].shape[1]] = self._reference[layer]  # a shared expert's gate stays
        bias = self._biases.get(layer)
        own, wanted = (self._family.route(part, bias).experts for part in (np.array(logits), expected))
        same = (own[:, :, None] == wanted[:, None, :]).any(axis=2)
        self.agreed += int(same.sum())
        self.all += same.size
        if self._impose:
            logits[...] = expected
