"""Reads config.json into a family's frozen dataclass; nothing that may change the arithmetic is overlooked.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Mapping
from typing import Any, TypeVar

from estream.errors import CheckpointError, UnsupportedModelError, brief
from estream.models.fields import typed
from estream.models.rope_config import ROPE_FIELDS, read_rope

Config = TypeVar("Config")

# Reviewed: none of these changes the logits of a prefill. Training, sampling, storage, labels, provenance.
HARMLESS = frozenset(
    """
    architectures model_type dtype torch_dtype transformers_version name_or_path _name_or_path _commit_hash
    attn_implementation _attn_implementation _attn_implementation_autoset unsloth_version unsloth_fixed
    auto_map initializer_range use_cache attention_dropout hidden_dropout router_aux_loss_coef router_jitter_noise
    input_jitter_noise output_router_logits aux_loss_alpha seq_aux pretraining_tp ep_size
    output_attentions output_hidden_states return_dict return_dict_in_generate
    bos_token_id eos_token_id pad_token_id unk_token_id sep_token_id cls_token_id mask_token_id
    id2label label2id num_labels problem_type finetuning_task task_specific_params
    max_length min_length do_sample num_beams temperature top_k top_p repetition_penalty
    """.split()  # noqa: SIM905
)
_LARGEST = 2**31 - 1
# Work and memory grow with these before a weight is read.
_MOST = {"num_hidden_layers": 4096, "experts": 4096, "vocab_size": 1 << 24}


def read_config(
    cls: type[Config], raw: Mapping[str, Any], model_type: str, *, aliases: Mapping[str, str] | None = None
) -> Config:
    """Builds the frozen dataclass `cls` from config.json or from its own `asdict`.

    `cls` has fields `rope_theta`, `rope_scaling` and `max_position_embeddings`.

    aliases: field by the other name that some version of transformers writes for it.

    An omitted field takes the dataclass's default, which is transformers' own. A field that is neither in `cls` nor in
    HARMLESS is an error, unless it is null. Raises UnsupportedModelError or CheckpointError.
    """
    if raw.get("model_type", model_type) != model_type:
        raise CheckpointError("config.json: model_type", asked=model_type, had=brief(raw["model_type"]))
    method = raw.get("quantization_config")
    if isinstance(method, Mapping):
        if method.get("fmt") not in (None, "e4m3"):
            raise UnsupportedModelError(
                "config.json: quantization_config.fmt", asked="'e4m3'", had=brief(method["fmt"])
            )
        method = method.get("quant_method", method)
    if method not in (None, "fp8", "mxfp4"):  # what the scales belong to, the checkpoint knows
        raise UnsupportedModelError(
            "config.json: quantization_config: the weights are already quantised",
            had=brief(method),
            next_step="Pack the original f32, f16, bf16 or FP8 checkpoint; EStream quantises by itself",
        )
    raw = _renamed(raw, aliases or {})
    hints = typing.get_type_hints(cls)
    values: dict[str, Any] = {}
    for field in dataclasses.fields(cls):  # type: ignore[arg-type]
        if field.name not in ("rope_theta", "rope_scaling") and field.name in raw:
            values[field.name] = typed(field.name, raw[field.name], hints[field.name])
    defaults = {field.name: field.default for field in dataclasses.fields(cls)}  # type: ignore[arg-type]
    context = values.get("max_position_embeddings", defaults["max_position_embeddings"])
    values["rope_theta"], values["rope_scaling"] = read_rope(
        raw, float(typing.cast(float, defaults["rope_theta"])), context
    )
    known = HARMLESS | ROPE_FIELDS | {"quantization_config"} | set(hints)
    unknown = sorted(name for name, value in raw.items() if name not in known and value is not None)
    if unknown:
        raise UnsupportedModelError(
            f"config.json: fields that {model_type} does not have in EStream: {', '.join(unknown)}",
            next_step="They may change the arithmetic; if they do not, add them to estream/models/config.py",
        )
    return cls(**values)


def _renamed(raw: Mapping[str, Any], aliases: Mapping[str, str]) -> dict[str, Any]:
    renamed = dict(raw)
    for other, name in aliases.items():
        value = renamed.pop(other, None)
        if value is not None and renamed.setdefault(name, value) != value:
            had = f"{brief(renamed[name])} and {brief(value)}"
            raise CheckpointError(f"config.json: {name} and {other} are one field and differ", had=had)
    return renamed


class GroupedHeads:
    """What configs of decoders have in common; the fields are the dataclass's own."""

    hidden_size: int
    num_attention_heads: int
    num_key_value_heads: int | None
    head_dim: int | None

    @property
    def kv_heads(self) -> int:
        return self.num_attention_heads if self.num_key_value_heads is None else self.num_key_value_heads

    @property
    def head_size(self) -> int:
        return self.hidden_size // self.num_attention_heads if self.head_dim is None else self.head_dim


def check_window(window: int | None) -> None:
    """Raises CheckpointError unless it is none, or at least the query itself."""
    if window is not None and window < 1:
        raise CheckpointError("config.json: sliding_window", asked="at least 1, or null", had=window)


def check_decoder(config: Any, *, experts: int, positive: tuple[str, ...]) -> None:
    """Checks what all decoder families have in common, and that the fields in `positive` are at least 1.

    Raises UnsupportedModelError or CheckpointError.
    """
    common = ("vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads", "kv_heads", "head_size",
              "max_position_embeddings", "num_experts_per_tok")  # fmt: skip
    for name in common + positive:
        limit = _MOST.get(name, _LARGEST)
        if not 1 <= getattr(config, name) <= limit:
            raise CheckpointError(f"config.json: {name}", asked=f"1 to {limit}", had=getattr(config, name))
    if experts > _MOST["experts"]:
        raise CheckpointError("config.json: number of experts", asked=f"at most {_MOST['experts']}", had=experts)
    if config.hidden_act != "silu":
        raise UnsupportedModelError("config.json: hidden_act", asked="'silu'", had=brief(config.hidden_act))
    if config.num_attention_heads % config.kv_heads:
        raise CheckpointError(
            "config.json: num_attention_heads is not a multiple of num_key_value_heads",
            had=f"{config.num_attention_heads} and {config.kv_heads}",
        )
    if config.head_dim is None and config.hidden_size % config.num_attention_heads:
        raise CheckpointError(
            "config.json: hidden_size is not a multiple of num_attention_heads and there is no head_dim",
            had=f"{config.hidden_size} and {config.num_attention_heads}",
        )
    if config.head_size % 2:
        raise CheckpointError("config.json: rotary embedding needs an even head size", had=config.head_size)
    if config.num_experts_per_tok > experts:
        raise CheckpointError(
            "config.json: num_experts_per_tok", asked=f"at most {experts} experts", had=config.num_experts_per_tok
        )
    for name in ("rms_norm_eps", "rope_theta"):
        if not getattr(config, name) > 0:
            raise CheckpointError(f"config.json: {name}", asked="more than 0", had=getattr(config, name))
    if config.rope_scaling is not None:
        config.rope_scaling.check(config.head_size, config.rope_theta)
