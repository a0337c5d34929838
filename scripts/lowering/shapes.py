"""Architectures of public models, for graphs that are compiled without a package."""

from __future__ import annotations

from estream.models import family
from estream.models.base import Architecture
from estream.package.presets import preset_config


def _preset(name: str) -> Architecture:
    config = preset_config(name)
    return family(config["model_type"]).from_config(config).architecture()


def architectures() -> dict[str, Architecture]:
    """By name."""
    return {
        "olmoe": _preset("olmoe-1b-7b"),
        "qwen3-30b-a3b": _preset("qwen3-30b-a3b"),
        "deepseek-v2-lite": _preset("deepseek-v2-lite"),
        "lfm2.5-8b-a1b": _preset("lfm2.5-8b-a1b"),
        "phi-3.5-moe": _preset("phi-3.5-moe"),
        "gpt-oss-20b": _preset("gpt-oss-20b"),
        "mixtral": _preset("mixtral-8x7b"),
    }
