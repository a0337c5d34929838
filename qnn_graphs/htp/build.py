"""All graphs of a packed model for the HTP: at most eight, whatever the numbers of layers and experts."""

from __future__ import annotations

from dataclasses import dataclass

import onnx

from estream.models.base import Architecture
from estream.package.chunks import head_groups
from estream.package.layout import PanelLayout, default_panel_width
from qnn_graphs.htp.attention import build_attention
from qnn_graphs.htp.dense import build_head, build_norm, build_o, build_qkv
from qnn_graphs.htp.expert import ExpertGraph, build_expert

MAX_CONTEXTS = 8  # what phones hold at a time

LADDER = ((16, 32), (4, 128), (2, 256))  # (slots, rows)
INT4_LADDER = ((8, 32), (2, 128), (1, 256))  # more slots: unpacking's run list and the time to compile explode


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
    rows, steps = (256, 2) if whole else (128, 4)
    ladder = INT4_LADDER if experts == "int4" else LADDER
    return HtpPlan(rows, steps, width, PanelLayout(arch.hidden, width, experts).chunks, ladder)


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
