"""All graphs of a packed model for the HTP: at most eight, whatever the numbers of layers and experts."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from estream.models.base import Architecture
from qnn_graphs.htp.attention import build_attention
from qnn_graphs.htp.dense import build_head, build_norm, build_o, build_qkv, head_groups
from qnn_graphs.htp.expert import ExpertGraph, build_expert
from qnn_graphs.htp.weights import CHUNK_ELEMENTS

MAX_CONTEXTS = 8  # what phones hold at a time

_WIDEST_PANEL = 2048  # channels; found spill-free at 256 rows in every scheme for hidden sizes up to 4096
_LADDER = ((16, 32), (4, 128), (2, 256))  # (slots, rows)
_INT4_ELEMENTS = 1 << 22  # hidden · width: beyond, unpacking's run list and the time to compile explode
_INT4_LADDER = ((8, 32), (2, 128), (1, 256))  # for the same reason


@dataclass(frozen=True)
class HtpPlan:
    """The fixed sizes of a package's HTP graphs.

    `rows`: of norm, qkv, o, and of attention's query and key blocks. `steps`: key blocks per attention call. `ladder`:
    (slots, rows) of the expert graphs. `chunks`: column chunks of gate, up and down. `head_rows`: rows of a head call.
    """

    rows: int
    steps: int
    width: int
    chunks: int
    ladder: tuple[tuple[int, int], ...]
    head_rows: int = 32


def expert_chunks(hidden: int, width: int) -> int:
    """Column chunks of a panel's matrices: the least power of two that the on-chip memory of every SoC likes."""
    chunks = 1
    while hidden * width // chunks > CHUNK_ELEMENTS and width % (64 * chunks) == 0 and hidden % (64 * chunks) == 0:
        chunks *= 2
    return chunks


def panel_width(hidden: int, intermediate: int, scheme: str) -> int:
    """The widest equal split of an expert that runs without spilling, a multiple of 128 where it is split.

    Column chunks, not panel widths, are what on-chip memory limits.
    """
    limit = min(_WIDEST_PANEL, _INT4_ELEMENTS // hidden) if scheme == "int4" else _WIDEST_PANEL
    if intermediate <= limit:
        return -(-intermediate // 64) * 64
    panels = -(-intermediate // limit)
    return -(-intermediate // panels // 128) * 128


def default_plan(arch: Architecture, *, experts: str, dense: str) -> HtpPlan:
    """The best sizes that the search found (docs/htp.md)."""
    width = panel_width(arch.hidden, arch.expert_intermediate, experts)
    groups = head_groups(arch.attention)
    whole = groups.heads == groups.kv_heads and arch.hidden <= 2048 and dense != "f16"
    rows, steps = (256, 2) if whole else (128, 4)
    ladder = _INT4_LADDER if experts == "int4" else _LADDER
    return HtpPlan(rows, steps, width, expert_chunks(arch.hidden, width), ladder)


def build_graphs(
    arch: Architecture, *, experts: str, dense: str, head_width: int, plan: HtpPlan
) -> dict[str, onnx.ModelProto]:
    """Graphs by name; one attention graph serves all windows, one norm graph all norms of the residual stream.

    Raises:
        ValueError: schemes or sizes that do not divide, or more than MAX_CONTEXTS graphs.
    """
    models = [
        build_norm(arch, plan.rows),
        build_qkv(arch, dense, plan.rows),
        build_attention(head_groups(arch.attention), plan.rows, plan.rows, plan.steps),
        build_o(arch, dense, plan.rows),
        build_head(arch, dense, plan.head_rows, head_width),
    ]
    for slots, rows in plan.ladder:
        models.append(build_expert(ExpertGraph(arch.hidden, plan.width, experts, slots, rows, plan.chunks)))
    if len(models) > MAX_CONTEXTS:
        raise ValueError(f"{len(models)} graphs; a phone holds {MAX_CONTEXTS} contexts at a time")
    return {model.graph.name: model for model in models}
