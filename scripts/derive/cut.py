"""Observes the dense model on the calibration text and cuts every layer: the derivation without its files."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from .dense_llama import hidden_states
from .llama_gguf import Llama
from .router import ridge, scaled, targets
from .split import Split, split_neurons, strengths


@dataclass(frozen=True)
class LayerCut:
    """One layer's neurons and its router weight [E, H] float32."""

    split: Split
    router: np.ndarray


def cut(
    model: Llama,
    sequences: Sequence[Sequence[int]],
    *,
    experts: int,
    shared: int,
    progress: Callable[[int, int], None] | None = None,
) -> list[LayerCut]:
    """Cuts all layers, each while the forward pass is at it: memory holds one layer's activations.

    `sequences`: calibration token ids; `shared`: neurons of the shared expert; `progress`: called with (layers, of).
    """
    cuts: list[LayerCut] = []

    def observe(index: int, hidden: np.ndarray, normed: np.ndarray, active: np.ndarray) -> None:
        down = model.layers[index].down
        split = split_neurons(strengths(active, down, hidden), shared, experts)
        router = ridge(normed, targets(active, down, hidden, split))
        cuts.append(LayerCut(split, scaled(router, normed)))
        if progress is not None:
            progress(len(cuts), len(model.layers))

    hidden_states(model, sequences, np.float32, observe)
    return cuts
