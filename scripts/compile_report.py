"""What the NPU's compiler says of whole models: every graph of a package, per SoC, and the traffic of whole prompts.

    python -m scripts.compile_report --cache reports.jsonl --markdown report.md
    python -m scripts.compile_report --models olmoe --schemes int8 --socs sm8850 --json

Per model, scheme and SoC: all graphs that `estream compile` would build, compiled; their DDR traffic, spills and
operations; over the expert dispatches of one layer of a 1,000-token prompt, every expert with the same load, the
traffic relative to the least there can be (each panel's weights once, each tile of each panel in and out once); and
the traffic of a whole prefill of 4,096 tokens, routed at random, as the sum over all calls of all graphs.

Exit status 1 when a bound is missed: all graphs of a package and SoC within 120 s, contexts under 8 MB and at most 8,
no spills in experts, traffic 1.1 (int8), 1.2 (f16; Mixtral 1.7) or 1.8 (int4; Mixtral unbounded) times the least, at
most 300 vector operations per int8 OLMoE panel at 128 rows on SM8850, 40 GB for OLMoE at 4,096 tokens in int8.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from estream.layers.htp.calls import dense_calls, expert_calls
from estream.models.base import Architecture, LayerPlan
from estream.models.choose import near_ties
from estream.package.chunks import head_groups
from estream.package.layout import default_dense, head_slices
from qnn_graphs.htp.build import HtpPlan, build_graphs, default_plan
from qnn_graphs.htp.expert import ExpertGraph
from scripts.lowering.cache import ReportCache
from scripts.lowering.shapes import architectures

TOKENS, LONG = 1000, 4096
MOST_SECONDS, MOST_BYTES, MOST_CONTEXTS, MOST_VECTOR, MOST_TRAFFIC = 120, 8_000_000, 8, 300, 40e9
MOST_RATIO = {"int8": 1.1, "f16": 1.2, "int4": 1.8}


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", default=",".join(architectures()))
    parser.add_argument("--schemes", default="int8,f16,int4")
    parser.add_argument("--socs", default="sm8650,sm8850")
    parser.add_argument("--cache", type=Path, help="keeps the compiler's reports here")
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    cache, results = ReportCache(args.cache, timeout_s=600), []
    for name in args.models.split(","):
        for scheme in args.schemes.split(","):
            for soc in args.socs.split(","):
                result = examine(name, scheme, soc, cache)
                results.append(result)
                if not args.json:
                    print(_line(result), flush=True)
    if args.json:
        print(json.dumps(results, indent=1))
    if args.markdown:
        args.markdown.write_text(markdown(results))
    missed = [f"{r['model']} {r['scheme']} {r['soc']}: {what}" for r in results for what in r["missed"]]
    for line in missed:
        print(f"missed: {line}", file=sys.stderr)
    return int(bool(missed))


def examine(name: str, scheme: str, soc: str, cache: ReportCache) -> dict[str, Any]:
    """Compiles one model's graphs for one SoC, and sums up."""
    arch, dense = architectures()[name], default_dense(scheme)
    plan = default_plan(arch, experts=scheme, dense=dense)
    slices, head_width = head_slices(arch.vocab)
    models = build_graphs(arch, experts=scheme, dense=dense, head_width=head_width, plan=plan)
    graphs = {graph: cache.report(model, soc, model=name, graph=graph) for graph, model in models.items()}
    found: dict[str, Any] = {"model": name, "scheme": scheme, "dense": dense, "soc": soc, "width": plan.width}
    refused = [f"{graph}: {said['refused']}" for graph, said in graphs.items() if "refused" in said]
    if refused:
        return found | {"graphs": graphs, "missed": refused}
    found |= {
        "graphs": graphs,
        "contexts": len(graphs),
        "context_bytes": sum(said["context_bytes"] for said in graphs.values()),
        "largest_context": max(said["context_bytes"] for said in graphs.values()),
        "seconds": sum(said["seconds"] for said in graphs.values()),
        "spilled": {graph: said["spill_bytes"] for graph, said in graphs.items() if said["spill_bytes"]},
        "experts_1000": even_layer(arch, scheme, plan, graphs),
        "prefill_4096": prefill(arch, plan, slices, graphs),
    }
    middle = "expert.{}x{}".format(*plan.ladder[1])
    found["vector_per_panel"], found["vector_rows"] = graphs[middle]["vector"] / _slots(middle), plan.ladder[1][1]
    return found | {"missed": missed(found)}


def even_layer(
    arch: Architecture, scheme: str, plan: HtpPlan, graphs: Mapping[str, dict[str, Any]]
) -> dict[str, float]:
    """Traffic of the expert dispatches of one layer, every expert with TOKENS * k / E rows."""
    ladder = sorted(plan.ladder, key=lambda rung: -rung[1])
    rows, panels = TOKENS * arch.top_k // arch.experts, -(-arch.expert_intermediate // plan.width)
    layers = [at for at in arch.layers if at.ffn == "moe"][:1]
    one = expert_calls(
        _only(arch, layers), TOKENS, {layers[0].index: [rows] * arch.experts}, width=plan.width, ladder=ladder
    )
    traffic = sum(count * _traffic(graphs[graph]) for graph, count in one.items())
    spec = ExpertGraph(arch.hidden, plan.width, scheme, 1, rows, plan.chunks)
    weights = arch.experts * panels * spec.weight_bytes
    return {
        "rows_per_expert": rows,
        "panels_per_expert": panels,
        "traffic": traffic,
        "ratio": traffic / (weights + arch.experts * panels * spec.tile_bytes),
        "ratio_if_a_tile_crossed_once_per_expert": traffic / (weights + arch.experts * spec.tile_bytes),
    }


def prefill(arch: Architecture, plan: HtpPlan, slices: int, graphs: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """DDR traffic in bytes of LONG tokens, logits of the last one, by graph."""
    random = np.random.default_rng(0)
    counts, near = {}, []
    for layer in arch.moe_layers:
        logits = random.standard_normal((LONG, arch.experts), dtype=np.float32)
        chosen = np.argsort(logits, axis=1)[:, -arch.top_k :]
        counts[layer] = np.bincount(chosen.reshape(-1), minlength=arch.experts).tolist()
        near.append(len(near_ties(logits, arch.top_k)))
    groups = head_groups(arch.attention).groups
    calls = dense_calls(arch, LONG, rows=plan.rows, steps=plan.steps, groups=groups, slices=slices, near=near)
    ladder = sorted(plan.ladder, key=lambda rung: -rung[1])
    calls += expert_calls(arch, LONG, counts, width=plan.width, ladder=ladder)
    by_graph = {graph: {"calls": calls[graph], "traffic": calls[graph] * _traffic(graphs[graph])} for graph in graphs}
    return {"by_graph": by_graph, "traffic": sum(each["traffic"] for each in by_graph.values())}


def missed(found: Mapping[str, Any]) -> list[str]:
    """Bounds that do not hold, with the figure."""
    name, scheme = found["model"], found["scheme"]
    ratio = MOST_RATIO[scheme] if name != "mixtral" else {"int8": 1.1, "f16": 1.7, "int4": float("inf")}[scheme]
    checks = [
        ("seconds", found["seconds"], MOST_SECONDS),
        ("bytes of all contexts", found["context_bytes"], MOST_BYTES),
        ("contexts", found["contexts"], MOST_CONTEXTS),
        ("expert traffic, times the least", found["experts_1000"]["ratio"], ratio),
        ("bytes that experts spill", sum(n for graph, n in found["spilled"].items() if _slots(graph)), 0),
    ]
    if (name, scheme, found["soc"]) == ("olmoe", "int8", "sm8850"):
        checks.append(("vector operations per panel", found["vector_per_panel"], MOST_VECTOR))
    if (name, scheme) == ("olmoe", "int8"):
        checks.append(("bytes of a prefill of 4,096 tokens", found["prefill_4096"]["traffic"], MOST_TRAFFIC))
    return [f"{what}: {had:g} (at most {most:g})" for what, had, most in checks if had > most]


def markdown(results: list[dict[str, Any]]) -> str:
    """The tables of docs/htp.md: packages, graphs, and a whole prefill by graph."""
    whole = [result for result in results if "contexts" in result]
    lines = [
        "| model | scheme (dense) | SoC | compiled in s | contexts | KB, all | MB spilled per run | panels | expert "
        "traffic, 1,000 tokens | vector operations per panel, at rows | GB at 4,096 tokens |",
        "|" + " --- |" * 11,
    ]
    for r in whole:
        spilled = ", ".join(f"{graph} {n / 1e6:.1f}" for graph, n in r["spilled"].items()) or "0"
        even = r["experts_1000"]
        lines.append(
            f"| {r['model']} | {r['scheme']} ({r['dense']}) | {r['soc']} | {r['seconds']:.0f} | {r['contexts']} "
            f"| {r['context_bytes'] // 1024} | {spilled} | {even['panels_per_expert']} x {r['width']} "
            f"| {even['ratio']:.3f} | {r['vector_per_panel']:.0f}, {r['vector_rows']} "
            f"| {r['prefill_4096']['traffic'] / 1e9:.1f} |"
        )
    lines += [
        "",
        "| model | scheme | SoC | graph | s | context KB | MB read / written | operations: scalar/vector/matrix "
        "| calls, 4,096 tokens | GB, 4,096 tokens |",
        "|" + " --- |" * 10,
    ]
    for r in whole:
        for graph, said in r["graphs"].items():
            calls, mb = r["prefill_4096"]["by_graph"][graph], {k: said[f"{k}_bytes"] / 1e6 for k in ("read", "write")}
            lines.append(
                f"| {r['model']} | {r['scheme']} | {r['soc']} | {graph} | {said['seconds']:.0f} "
                f"| {said['context_bytes'] // 1024} | {mb['read']:.1f} / {mb['write']:.1f} "
                f"| {said['scalar']}/{said['vector']}/{said['matrix']} | {calls['calls']} "
                f"| {calls['traffic'] / 1e9:.2f} |"
            )
    return "\n".join(lines) + "\n"


def _line(r: Mapping[str, Any]) -> str:
    head = f"{r['model']} {r['scheme']} {r['soc']}: "
    if "contexts" not in r:
        return head + "; ".join(r["missed"])
    even = r["experts_1000"]
    return head + (
        f"{r['contexts']} contexts, {r['context_bytes'] // 1024} KB in {r['seconds']:.0f} s; "
        f"spills {r['spilled'] or 0}; "
        f"experts {even['ratio']:.3f} of the least ({even['ratio_if_a_tile_crossed_once_per_expert']:.3f} if a tile "
        f"crossed once per expert); {r['vector_per_panel']:.0f} vector operations per panel, {r['vector_rows']} rows; "
        f"{r['prefill_4096']['traffic'] / 1e9:.1f} GB at 4,096 tokens"
    )


def _only(arch: Architecture, layers: list[LayerPlan]) -> Architecture:
    return replace(arch, layers=tuple(layers), shared_intermediate=0)


def _slots(graph: str) -> int:
    return int(graph.split(".")[1].split("x")[0]) if graph.startswith("expert.") else 0


def _traffic(said: Mapping[str, Any]) -> int:
    return int(said["read_bytes"]) + int(said["write_bytes"])


if __name__ == "__main__":
    sys.exit(main())
