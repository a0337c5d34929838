"""Rotary embedding in config.json: transformers 4 writes rope_theta and rope_scaling, transformers 5 rope_parameters.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from estream.errors import CheckpointError, UnsupportedModelError, brief
from estream.models.fields import typed

ROPE_FIELDS = frozenset(
    {"rope_theta", "rope_scaling", "rope_parameters", "partial_rotary_factor", "original_max_position_embeddings"}
)
_OLD_NAMES = {"su": "longrope"}
_COMMON = frozenset({"rope_type", "type", "rope_theta", "partial_rotary_factor"})
_NEEDS = {
    "linear": {"factor"},
    "yarn": {"factor"},
    "longrope": {"short_factor", "long_factor"},
    "llama3": {"factor", "low_freq_factor", "high_freq_factor"},
}
_TAKES = {
    "linear": {"original_max_position_embeddings"},
    "yarn": {"original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale",
             "mscale_all_dim", "truncate"},
    "longrope": {"original_max_position_embeddings", "factor", "attention_factor", "short_mscale", "long_mscale"},
    "llama3": {"original_max_position_embeddings"},
}  # fmt: skip
_MAY_BE_ZERO = frozenset({"mscale", "mscale_all_dim"})


@dataclass(frozen=True)
class RopeScaling:
    """How positions beyond the original context are reached; config.json's own field names, None where not given.

    rope_type: linear, yarn (YaRN, arXiv 2309.00071), longrope (LongRoPE, arXiv 2402.13753), llama3 (Llama 3.1).
    original_max_position_embeddings: the context before scaling. factor: longrope's is the ratio of contexts.
    """

    rope_type: str
    factor: float
    original_max_position_embeddings: int
    attention_factor: float | None = None
    beta_fast: float | None = None
    beta_slow: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    truncate: bool | None = None
    low_freq_factor: float | None = None
    high_freq_factor: float | None = None
    short_factor: tuple[float, ...] | None = None
    long_factor: tuple[float, ...] | None = None
    short_mscale: float | None = None
    long_mscale: float | None = None

    def check(self, width: int, theta: float) -> None:
        """width: rotated components of a head. Raises CheckpointError."""
        for name in ("short_factor", "long_factor"):
            factors = getattr(self, name)
            if factors is not None and len(factors) != width // 2:
                raise CheckpointError(f"config.json: {name}: one factor per pair", asked=width // 2, had=len(factors))
        if self.rope_type == "yarn" and theta <= 1:
            raise CheckpointError("config.json: rope_theta with yarn", asked="more than 1", had=theta)


def read_rope(raw: Mapping[str, Any], default_theta: float, context: int) -> tuple[float, RopeScaling | None]:
    """rope_theta and the scaling, if any. context: max_position_embeddings, the original context unless one is given.

    Raises UnsupportedModelError for a kind of rotary embedding that is not known, CheckpointError for values that make
    no sense.
    """
    thetas: dict[str, float] = {}
    if raw.get("rope_theta") is not None:
        thetas["rope_theta"] = typed("rope_theta", raw["rope_theta"], float)
    partial = raw.get("partial_rotary_factor")
    scalings: list[RopeScaling] = []
    for name in ("rope_parameters", "rope_scaling"):
        rope = raw.get(name)
        if not rope:
            continue
        if not isinstance(rope, Mapping):
            raise CheckpointError(f"config.json: {name}", asked="a dictionary or null", had=brief(rope))
        if rope.get("rope_theta") is not None:
            thetas[f"{name}.rope_theta"] = typed(f"{name}.rope_theta", rope["rope_theta"], float)
        partial = rope.get("partial_rotary_factor", partial)
        scaling = _read_scaling(name, rope, raw.get("original_max_position_embeddings"), context)
        if scaling is not None:
            scalings.append(scaling)
    if partial not in (None, 1):
        raise UnsupportedModelError(
            "config.json: partial_rotary_factor", asked="1 (the whole head)", had=brief(partial)
        )
    if len(set(thetas.values())) > 1:
        had = ", ".join(f"{name} {theta:g}" for name, theta in thetas.items())
        raise CheckpointError("config.json: rope_theta given more than once with different values", had=had)
    if len(set(scalings)) > 1:
        raise CheckpointError("config.json: rope_parameters and rope_scaling differ")
    return next(iter(thetas.values()), default_theta), scalings[0] if scalings else None


def _read_scaling(name: str, rope: Mapping[str, Any], original: Any, context: int) -> RopeScaling | None:
    kind = rope.get("rope_type") or rope.get("type") or "default"
    kind = _OLD_NAMES.get(kind, kind) if isinstance(kind, str) else kind
    given = {key for key, value in rope.items() if value is not None} - _COMMON
    known = kind in _NEEDS if isinstance(kind, str) else False
    unknown = sorted(map(str, given - _NEEDS[kind] - _TAKES[kind] if known else given))
    other = rope.get("type") or kind
    if (not known and kind != "default") or unknown or _OLD_NAMES.get(other, other) != kind:
        had = brief(kind) + (f" with {', '.join(unknown)}" if unknown else "")
        asked = f"'default', {', '.join(map(repr, _NEEDS))}, with their own fields"
        raise UnsupportedModelError(f"config.json: {name}: kind of rotary embedding", asked=asked, had=had)
    if kind == "default":
        return None
    for field in sorted(_NEEDS[kind] - given):
        raise CheckpointError(f"config.json: {name}: {kind} needs {field}", had=", ".join(sorted(given)) or "none")
    values: dict[str, Any] = dict(rope)
    if original is not None:  # as in transformers: the config's own field wins
        values["original_max_position_embeddings"] = original
    if values.get("original_max_position_embeddings") is None:
        values["original_max_position_embeddings"] = context
    hints = typing.get_type_hints(RopeScaling)
    fields = {
        field.name: typed(f"{name}.{field.name}", values[field.name], hints[field.name])
        for field in dataclasses.fields(RopeScaling)
        if field.name != "rope_type" and values.get(field.name) is not None
    }
    for field, value in fields.items():
        for number in value if isinstance(value, tuple) else (value,):
            if not isinstance(number, bool) and not (number > 0 or (number == 0 and field in _MAY_BE_ZERO)):
                raise CheckpointError(f"config.json: {name}.{field}", asked="more than 0", had=brief(number))
    if ("short_mscale" in fields) != ("long_mscale" in fields):
        raise CheckpointError(f"config.json: {name}: short_mscale and long_mscale go together")
    if kind == "llama3" and not fields["high_freq_factor"] > fields["low_freq_factor"]:
        raise CheckpointError(f"config.json: {name}: high_freq_factor must be more than low_freq_factor")
    fields.setdefault("factor", context / fields["original_max_position_embeddings"])
    return RopeScaling(rope_type=kind, **fields)
