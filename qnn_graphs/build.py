"""All graphs of a packed model for one target."""

from __future__ import annotations

import onnx

from estream.models.base import Architecture
from estream.package.layout import DENSE_SCHEMES, SCHEMES, PanelLayout
from qnn_graphs.attention import attention_name, build_attention
from qnn_graphs.conv import build_conv
from qnn_graphs.expert import build_expert
from qnn_graphs.head import build_final_norm, build_head
from qnn_graphs.latent import build_latent_qkv
from qnn_graphs.linear import integer_path
from qnn_graphs.movement import build_gather, build_quantise, build_scatter_add
from qnn_graphs.qkv import build_qkv
from qnn_graphs.router import build_closing

TARGETS = ("cpu", "cpu-u8", "reference")


def build_graphs(
    architecture: Architecture, *, experts: str, dense: str, panel_width: int, head_width: int, target: str
) -> dict[str, onnx.ModelProto]:
    """Graphs by name, the same bytes on every call.

    Args:
        architecture: of the model.
        experts, dense: weight schemes of panels and of attention and head.
        panel_width: intermediate channels of a panel.
        head_width: columns of a head slice.
        target: `cpu`, `cpu-u8` (its 8-bit products take uint8 weights), or `reference` (weights dequantised, products
            in float32).

    Raises:
        ValueError: an unknown scheme or target.
    """
    if target not in TARGETS:
        raise ValueError(f"target {target!r} is none of {TARGETS}")
    for scheme, known in ((experts, SCHEMES), (dense, DENSE_SCHEMES)):
        if scheme not in known:
            raise ValueError(f"weight scheme {scheme!r} is none of {known}")
    hidden, clamped = architecture.hidden, architecture.clamped
    graphs = {
        "qkv": (build_qkv if architecture.attention.latent is None else build_latent_qkv)(architecture, dense, target),
        "expert": build_expert(PanelLayout(hidden, panel_width, experts, clamped is not None), target, clamped),
        "gather": build_gather(hidden, quantised=integer_path(experts, target)),
        "scatter_add": build_scatter_add(hidden),
        "final_norm": build_final_norm(architecture),
        "head": build_head(architecture, head_width, dense, target),
    }
    if integer_path(experts, target):
        graphs["quantise"] = build_quantise(hidden)
    for plan in architecture.layers:
        name = "conv" if plan.mixer == "conv" else attention_name(plan.window)
        if name not in graphs and plan.mixer == "conv":
            graphs[name] = build_conv(architecture, dense, target)
        elif name not in graphs:
            graphs[name] = build_attention(architecture.attention, plan.window)
        closing = "o_router" if plan.ffn == "moe" else "o_norm"
        if closing not in graphs:
            graphs[closing] = build_closing(architecture, dense, target, router=plan.ffn == "moe")
    return graphs
