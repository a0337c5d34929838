"""`estream inspect`: what a package holds, or what packing a checkpoint would give."""

from __future__ import annotations

import argparse
import os
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from estream.cli.console import Console, table
from estream.cli.options import add_json, folder
from estream.errors import UsageError
from estream.models.base import Architecture, Attention, LayerPlan
from estream.package.layout import SCHEMES, PanelLayout, default_dense, default_panel_width, holds
from estream.units import format_bytes

NAME = "inspect"
HELP = "show a packed model, or the plan for a checkpoint"
DESCRIPTION = (
    "Shows a packed model: its layers, shape class, sizes and origin. Given a checkpoint instead, checks its tensors\n"
    "and shows the layer plan and the size that each weight scheme would have."
)
EXAMPLE = "  estream inspect olmoe.estream\n  estream inspect OLMoE-1B-7B-0924/"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the folder."""
    parser.add_argument("path", metavar="PACKAGE", type=folder, help="a packed model, or a checkpoint folder")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Shows the one or the other, by the file that the folder holds.

    Raises:
        UsageError: no such folder, or neither model.json nor config.json in it.
    """
    if not os.path.lexists(args.path):
        raise UsageError(f"{args.path}: no such file or folder")
    if (args.path / "model.json").is_file():
        facts, text = _package(args.path)
    elif (args.path / "config.json").is_file():
        facts, text = _checkpoint(args.path)
    else:
        raise UsageError(
            f"{args.path} is neither a packed model nor a checkpoint",
            had="no model.json and no config.json",
            next_step="Give the folder that holds one of them.",
        )
    console.result(text)
    if args.verbose and "tensors" in facts:
        for tensor in facts["tensors"]:
            console.more(
                f"  {tensor['name']:<28} {tensor['dtype']:<4} {tensor['shape']}  {format_bytes(tensor['bytes'])}"
            )
    console.result_json(facts)
    return 0


def _package(path: Path) -> tuple[dict[str, Any], str]:
    from estream.package.reader import Package

    package = Package.open(path)
    arch, pool, manifest = package.architecture, package.pool, package.manifest
    total = sum(entry.bytes for entry in manifest.files.values())
    tensors = [
        {"name": item.name, "dtype": item.dtype, "shape": list(item.shape), "bytes": item.nbytes}
        for item in package.dense.values()
    ]
    graphs = sorted({name.split("/")[1] for name in manifest.files if name.startswith("graphs/")})
    rows = [
        *_rows(arch),
        ("schemes", f"experts {manifest.experts}, dense {manifest.dense}"),
        (
            "records",
            f"{len(pool.moe_layers) * pool.experts} of {format_bytes(pool.record_bytes)}: {pool.panels_per_expert} "
            f"panel(s) of {format_bytes(pool.panel.panel_bytes)}, width {pool.panel.width}",
        ),
        ("experts", format_bytes(pool.pool_bytes)),
        ("dense", format_bytes(sum(item.nbytes for item in package.dense.values()))),
        ("on disk", f"{format_bytes(total)} in {len(manifest.files)} files"),
        ("graphs", ", ".join(graphs) or "none"),
        ("origin", _origin(manifest.source)),
        ("packed by", f"estream {manifest.estream}"),
    ]
    facts = {
        "kind": "package",
        "path": path,
        "architecture": arch,
        "pool_bytes": pool.pool_bytes,
        "record_bytes": pool.record_bytes,
        "file_bytes": total,
        "manifest": manifest.to_dict(),
        "tensors": tensors,
    }
    return facts, f"{path}: packed model\n{table(rows)}"


def _origin(source: Mapping[str, Any]) -> str:
    """'checkpoint', or 'synth, preset olmoe-1b-7b, seed 0'."""
    return ", ".join([str(source["kind"]), *(f"{key} {value}" for key, value in source.items() if key != "kind")])


def _checkpoint(path: Path) -> tuple[dict[str, Any], str]:
    from estream.checkpoint import Checkpoint

    with Checkpoint.open(path) as checkpoint:
        found = checkpoint.family()
        checkpoint.check(found)
    arch = found.architecture()
    sizes = {scheme: _sizes(arch, scheme) for scheme in SCHEMES if holds(arch.hidden, scheme)}
    lines = [
        (
            f"as {scheme}",
            f"experts {format_bytes(size['pool_bytes'])}, dense {format_bytes(size['dense_bytes'])}; record "
            f"{format_bytes(size['record_bytes'])}: {size['panels_per_expert']} panel(s), width {size['panel_width']}",
        )
        for scheme, size in sizes.items()
    ]
    facts = {"kind": "checkpoint", "path": path, "architecture": arch, "packed": sizes}
    return facts, f"{path}: checkpoint, every tensor present\n{table([*_rows(arch), *lines])}"


def _rows(arch: Architecture) -> list[tuple[str, str]]:
    """The layer plan and the geometry."""
    attention = arch.attention
    shared = f", shared expert {arch.shared_intermediate}" if arch.shared_intermediate else ""
    rows = [
        ("family", arch.family),
        ("hidden", f"{arch.hidden}, vocabulary {arch.vocab}, context {arch.context}"),
        ("attention", _attention(attention)),
        ("norm", "layer norm" if arch.norm == "layer" else "RMS norm"),
        ("ffn", f"{arch.experts} experts of {arch.expert_intermediate}, {arch.top_k} per token{shared}"),
    ]
    return rows + [("layers", line) for line in _runs(arch)]


def _attention(attention: Attention) -> str:
    """'16 heads, 16 of keys and values, head 192 of which 64 turn, values 128, latent rank 512, rope theta 10000'."""
    parts = [f"{attention.heads} heads", f"{attention.kv_heads} of keys and values", f"head {attention.head_dim}"]
    if attention.rotated != attention.head_dim:
        parts[-1] += f" of which {attention.rotated} turn"
    if attention.v_dim != attention.head_dim:
        parts.append(f"values {attention.v_dim}")
    if attention.latent is not None:
        ranks = f"rank {attention.latent.rank}"
        ranks += "" if attention.latent.query_rank is None else f", of queries {attention.latent.query_rank}"
        parts.append(f"latent {ranks}")
    parts.append(f"rope theta {attention.rope.theta:g}")
    scaling = attention.rope.scaling
    if scaling is not None:
        beyond = f"beyond {scaling.original_max_position_embeddings}"
        parts[-1] += f", {scaling.rope_type} by {scaling.factor:g} {beyond}"
    return ", ".join(parts)


def _runs(arch: Architecture) -> list[str]:
    """Runs of layers that do the same: '0-15: moe'."""

    def what(plan: LayerPlan) -> str:
        ffn = "moe" if plan.ffn == "moe" else f"dense {arch.dense_intermediate}"
        if plan.mixer == "conv":
            return f"{ffn}, convolution of {arch.conv_kernel}"
        return ffn if plan.window is None else f"{ffn}, attention window {plan.window}"

    lines = []
    for text, group in groupby(arch.layers, what):
        plans = list(group)
        first, last = plans[0].index, plans[-1].index
        lines.append(f"{first}: {text}" if first == last else f"{first}-{last}: {text}")
    return lines


def _sizes(arch: Architecture, scheme: str) -> dict[str, int]:
    """What packing experts in `scheme`, and the rest in what goes with it, would give, in bytes."""
    from estream.package.dense import dense_specs, place

    intermediate = arch.expert_intermediate or arch.dense_intermediate
    panel = PanelLayout(
        arch.hidden, default_panel_width(arch.hidden, intermediate, scheme), scheme, arch.clamped is not None
    )
    record = panel.record_bytes(arch.expert_intermediate)
    return {
        "panel_width": panel.width,
        "panels_per_expert": panel.panels(arch.expert_intermediate),
        "record_bytes": record,
        "pool_bytes": len(arch.moe_layers) * arch.experts * record,
        "dense_bytes": sum(item.nbytes for item in place(dense_specs(arch, default_dense(scheme), panel), 0)),
    }
