"""The tensors of dense.safetensors: names, dtypes, shapes and offsets, which follow from an architecture.

Arithmetic only.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from estream.models.base import Architecture, Attention, LayerPlan
from estream.package.chunks import CONV_LINEARS, chunk_names, linear_chunks, projection
from estream.package.layout import DTYPES, WEIGHT_DTYPE, PanelLayout, align, head_slices

_LINEARS = frozenset({"q_a", "q", "kv_a", "k_rope", "k", "v", "o", *CONV_LINEARS})
PAD = "__pad."  # names of the fills, which the file format needs because it allows no holes


@dataclass(frozen=True)
class DenseTensor:
    """One tensor of dense.safetensors. `offset` is absolute in the file, a multiple of 16 KiB; `nbytes` without fill.

    `panels` is 0, or the number of panels of a U8 record (`layers.3.shared`, `layers.3.ffn`).
    """

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int
    panels: int = 0

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


Spec = tuple[str, str, tuple[int, ...], int]  # name, dtype, shape, panels


def dense_specs(arch: Architecture, dense: str, panel: PanelLayout, spare: int = 0) -> Iterator[Spec]:
    """Every dense tensor in file order: embed, final_norm, head slices, then the layers one after the other.

    `spare`: panels of shared and ffn records beyond those that their channels fill."""
    hidden = arch.hidden
    yield "embed", "F32" if dense == "f32" else "F16", (arch.vocab, hidden), 0
    yield from _norm(arch, "final_norm")
    slices, width = head_slices(arch.vocab)
    for index in range(slices):
        yield from _linear(arch, f"head.{index}", hidden, width, dense)
        if arch.head_bias:
            yield f"head.{index}.bias", "F32", (width,), 0
    for plan in arch.layers:
        yield from _layer(arch, plan, dense, panel, spare)


def _norm(arch: Architecture, name: str) -> Iterator[Spec]:
    yield name, "F32", (arch.hidden,), 0
    if arch.norm == "layer":
        yield f"{name}.bias", "F32", (arch.hidden,), 0


def _linear(arch: Architecture, name: str, inputs: int, outputs: int, dense: str) -> Iterator[Spec]:
    """A matrix in column chunks, and for int8 the magnitudes of its columns."""
    chunks = linear_chunks(arch, name.rpartition(".")[2], outputs, dense)
    for key in chunk_names(name, chunks):
        yield key, WEIGHT_DTYPE[dense], (inputs, outputs // chunks), 0
    if dense == "int8":
        yield f"{name}.scale", "F16", (outputs,), 0


def linear_name(tensor: str) -> str | None:
    """The matrix that a tensor is a column chunk or the magnitudes of: layers.3.q.0 → layers.3.q; None for others."""
    parts = tensor.split(".")
    if parts[0] == "head" and parts[2:] != ["bias"]:
        return ".".join(parts[:2])
    if parts[0] == "layers" and parts[2] in _LINEARS and parts[3:] != ["bias"]:
        return ".".join(parts[:3])
    return None


def linears(attention: Attention, hidden: int) -> dict[str, tuple[int, int]]:
    """(rows, columns) of a layer's attention matrices by name, in file order."""
    latent, rotated = attention.latent, attention.rotated
    found: dict[str, tuple[int, int]] = {}
    if latent is not None:
        if latent.query_rank is not None:
            found["q_a"] = hidden, latent.query_rank
        found |= {"kv_a": (hidden, latent.rank), "k_rope": (hidden, rotated)}
    for name, heads in (("q", attention.heads), ("k", attention.kv_heads), ("v", attention.kv_heads)):
        depth, head = projection(attention, hidden, name)
        found[name] = depth, heads * head
    return found | {"o": (attention.out_width, hidden)}


def biased(attention: Attention) -> list[str]:
    """The matrices before attention that have a bias; of latent attention those that take the hidden state in."""
    if not attention.qkv_bias:
        return []
    if attention.latent is None:
        return ["q", "k", "v"]
    return ["kv_a", "k_rope"] + (["q_a"] if attention.latent.query_rank is not None else [])


def _layer(arch: Architecture, plan: LayerPlan, dense: str, panel: PanelLayout, spare: int) -> Iterator[Spec]:
    hidden, at = arch.hidden, f"layers.{plan.index}"
    yield from _norm(arch, f"{at}.attn_norm")
    yield from (_conv if plan.mixer == "conv" else _attention)(arch, at, dense)
    yield from _norm(arch, f"{at}.ffn_norm")
    if plan.ffn == "moe":
        yield f"{at}.router", "F32", (hidden, arch.router_width), 0
        if arch.expert_bias:
            yield f"{at}.expert_bias", "F32", (arch.experts,), 0
        if arch.shared_intermediate:
            yield _record(f"{at}.shared", panel, arch.shared_intermediate, spare)
    else:
        yield _record(f"{at}.ffn", panel, arch.dense_intermediate, spare)


def _attention(arch: Architecture, at: str, dense: str) -> Iterator[Spec]:
    attention, matrices = arch.attention, linears(arch.attention, arch.hidden)
    for name, (inputs, outputs) in matrices.items():
        yield from _linear(arch, f"{at}.{name}", inputs, outputs, dense)
    for name in biased(attention):
        yield f"{at}.{name}.bias", "F32", (matrices[name][1],), 0
    if arch.o_bias:
        yield f"{at}.o.bias", "F32", (arch.hidden,), 0
    if attention.qk_norm != "none":
        whole = attention.qk_norm == "projection"
        yield f"{at}.q_norm", "F32", (attention.q_width if whole else attention.head_dim,), 0
        yield f"{at}.k_norm", "F32", (attention.k_width if whole else attention.head_dim,), 0
    if attention.sinks:
        yield f"{at}.sinks", "F32", (attention.heads,), 0
    for name in ("q_a", "kv_a"):
        if name in matrices:
            yield f"{at}.{name}_norm", "F32", (matrices[name][1],), 0


def _conv(arch: Architecture, at: str, dense: str) -> Iterator[Spec]:
    for name in (*CONV_LINEARS, "o"):
        yield from _linear(arch, f"{at}.{name}", arch.hidden, arch.hidden, dense)
    yield f"{at}.conv", "F32", (arch.conv_kernel, arch.hidden), 0
    if arch.conv_bias:
        for name in (*CONV_LINEARS, "conv"):
            yield f"{at}.{name}.bias", "F32", (arch.hidden,), 0
    if arch.o_bias:
        yield f"{at}.o.bias", "F32", (arch.hidden,), 0


def _record(name: str, panel: PanelLayout, intermediate: int, spare: int) -> Spec:
    return name, "U8", (panel.record_bytes(intermediate, spare),), panel.panels(intermediate) + spare


def place(specs: Iterator[Spec], data_offset: int) -> tuple[DenseTensor, ...]:
    """Gives each tensor its offset: the data starts at `data_offset`, every tensor on 16 KiB."""
    tensors: list[DenseTensor] = []
    offset = data_offset
    for name, dtype, shape, panels in specs:
        tensors.append(DenseTensor(name, dtype, shape, offset, panels))
        offset = align(offset + tensors[-1].nbytes)
    return tuple(tensors)


def checked_count(tensors: Iterable[DenseTensor]) -> int:
    """How many pieces `checked_pieces` gives: arithmetic, for a damaged package could make it count for hours."""
    return sum(tensor.panels or 1 for tensor in tensors)


def checked_pieces(tensors: tuple[DenseTensor, ...]) -> Iterator[tuple[str, int, int]]:
    """(label, offset, nbytes) of every piece of dense.safetensors that has a CRC-32 of its own, in file order.

    A record has one per panel, any other tensor one for all of it.
    """
    for tensor in tensors:
        if tensor.panels:
            size = tensor.nbytes // tensor.panels
            for panel in range(tensor.panels):
                yield f"{tensor.name} panel {panel}", tensor.offset + panel * size, size
        else:
            yield tensor.name, tensor.offset, tensor.nbytes
