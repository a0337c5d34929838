"""Which layers of the Qwen MoE families have experts: every decoder_sparse_step-th that mlp_only_layers does not name.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

from typing import Protocol

from estream.errors import CheckpointError, UnsupportedModelError, brief


class SparseLayers(Protocol):
    """The fields of config.json that decide."""

    @property
    def num_hidden_layers(self) -> int: ...
    @property
    def decoder_sparse_step(self) -> int: ...
    @property
    def mlp_only_layers(self) -> tuple[int, ...] | None: ...


def is_moe(config: SparseLayers, layer: int) -> bool:
    """Whether a layer has experts; else it is dense."""
    return layer not in (config.mlp_only_layers or ()) and (layer + 1) % config.decoder_sparse_step == 0


def check_sparse_layers(config: SparseLayers) -> None:
    """Raises CheckpointError on layers that are not there or named twice, UnsupportedModelError without any experts."""
    layers, dense = range(config.num_hidden_layers), config.mlp_only_layers or ()
    outside = [layer for layer in dense if layer not in layers]
    if outside:
        raise CheckpointError("config.json: mlp_only_layers", asked=f"0 to {layers[-1]}", had=brief(outside))
    if len(set(dense)) != len(dense):
        raise CheckpointError("config.json: mlp_only_layers names a layer twice", had=brief(dense))
    if not any(is_moe(config, layer) for layer in layers):
        raise UnsupportedModelError("config.json: no layer has experts (mlp_only_layers, decoder_sparse_step)")
