"""All graphs of a packed model for the HTP: at most eight, whatever the numbers of layers and experts."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from estream.models.base import Architecture
from estream.package.chunks import head_groups
from estream.package.layout import PanelLayout, default_panel_width
from qnn_graphs.htp.attention import build_attention
from qnn_graphs.htp.conv import build_conv
from qnn_graphs.htp.dense import build_head, build_norm, build_o, build_qkv
from qnn_graphs.htp.expert import ExpertGraph, build_expert
from qnn_graphs.htp.latent import build_latent_qkv

MAX_CONTEXTS = 8  # what phones hold at a time

_SMALLEST, _LARGEST = 32, 256  # rows of a tile
_DISPATCH_ROWS = 512
_INT4_DISPATCH_ROWS = 256  # more: unpacking's run list and the time to compile explode
_USUAL_PROMPT = 1000
_STEPS = 4


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


def default_plan(arch: Architecture, *, experts: str, dense: str) -> HtpPlan:
    """The best sizes that the search found (docs/htp.md)."""
    width = default_panel_width(arch.hidden, arch.expert_intermediate, experts)
    groups = head_groups(arch.attention)
    whole = groups.heads == groups.kv_heads and arch.hidden <= 2048 and dense != "f16"
    rows = 256 if whole else 128
    # Convolutions are one more graph, for which a rung has to go.
    ladder = default_ladder(arch.experts, arch.top_k, experts, rungs=2 if arch.conv_kernel else 3)
    return HtpPlan(rows, _STEPS, width, PanelLayout(arch.hidden, width, experts).chunks, ladder)


def default_ladder(experts: int, top_k: int, scheme: str, rungs: int = 3) -> tuple[tuple[int, int], ...]:
    """(slots, rows) of three rungs: the smallest tile, one for an expert's fair share of a prompt of 1,000 tokens,
    which then reads each expert's weights once, and one twice as large, which two rungs leave out. Slots times rows
    is the same in all."""
    share = -(-_USUAL_PROMPT * top_k // experts // _SMALLEST) * _SMALLEST
    middle = min(max(share, 2 * _SMALLEST), _LARGEST // 2)
    whole = _INT4_DISPATCH_ROWS if scheme == "int4" else _DISPATCH_ROWS
    slots = max(1, whole // (2 * middle))
    return tuple((slots * 2 * middle // rows, rows) for rows in (_SMALLEST, middle, 2 * middle)[:rungs])


def build_graphs(
    arch: Architecture, *, experts: str, dense: str, head_width: int, plan: HtpPlan
) -> dict[str, onnx.ModelProto]:
    """Graphs by name; one attention graph serves all windows, one norm graph all norms of the residual stream.

    Raises:
        ValueError: schemes or sizes that do not divide, or more than MAX_CONTEXTS graphs.
    """
    models = [
        build_norm(arch, plan.rows),
        (build_qkv if arch.attention.latent is None else build_latent_qkv)(arch, dense, plan.rows),
        build_attention(head_groups(arch.attention), plan.rows, plan.rows, plan.steps, arch.attention.score_scale),
        build_o(arch, dense, plan.rows),
        build_head(arch, dense, plan.head_rows, head_width),
    ]
    if arch.conv_kernel:
        models.append(build_conv(arch, dense, plan.rows))
    for slots, rows in plan.ladder:
        models.append(
            build_expert(ExpertGraph(arch.hidden, plan.width, experts, slots, rows, plan.chunks, clamped=arch.clamped))
        )
    if len(models) > MAX_CONTEXTS:
        raise ValueError(f"{len(models)} graphs; a phone holds {MAX_CONTEXTS} contexts at a time")
    return {model.graph.name: model for model in models}
