"""Architectures of public models, for graphs that are compiled without a package."""

from __future__ import annotations

from estream.models import family
from estream.models.base import Architecture, Attention, LayerPlan, Rope
from estream.package.presets import preset_config


def _preset(name: str) -> Architecture:
    config = preset_config(name)
    return family(config["model_type"]).from_config(config).architecture()


def _layers(count: int, dense: int = 0) -> tuple[LayerPlan, ...]:
    return tuple(LayerPlan(at, "dense" if at < dense else "moe") for at in range(count))


def architectures() -> dict[str, Architecture]:
    """By name. deepseek-v2-lite: its experts and sizes with plain attention (16 heads of 128) in the place of MLA."""
    return {
        "olmoe": _preset("olmoe-1b-7b"),
        "qwen3-30b-a3b": _preset("qwen3-30b-a3b"),
        "deepseek-v2-lite": Architecture(
            family="deepseek_v2",
            hidden=2048,
            vocab=102400,
            context=163840,
            norm_eps=1e-6,
            attention=Attention(16, 16, 128, Rope(1e4)),
            layers=_layers(27, dense=1),
            experts=64,
            top_k=6,
            expert_intermediate=1408,
            shared_intermediate=2816,
            dense_intermediate=10944,
        ),
        "mixtral": _preset("mixtral-8x7b"),
        "lfm2.5-8b-a1b": _preset("lfm2.5-8b-a1b"),
    }
