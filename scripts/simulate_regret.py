"""Is the solver's choice the best on a simulated phone? Against every configuration, for 12 pairs of model and budget.

    python -m scripts.simulate_regret
    python -m scripts.simulate_regret --device oneplus12 --tokens 512 --json

Every configuration: the sweep of scripts/bench_solver.py (G in powers of two; the B that fill the budget's room, the
chosen arena or half of it; Q of 1, 2, 4 and 8; both ways to start), with the same dense weights and the same prompt.
Regret is the time of the solver's choice over the least of all, less 1. Exit status 1 where a regret is above 3.45 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import replace
from typing import Any

from estream.layers.weights import dense_bytes
from estream.package.outline import outline
from estream.solver.load import draw_counts
from estream.solver.npu import NpuCosts
from estream.solver.phone import Phone, load_phone
from estream.solver.search import Search, configurations, solve
from estream.units import format_bytes, format_seconds, parse_size
from qnn_graphs.htp.build import default_plan

PAIRS = {
    "olmoe-1b-7b": ("500MiB", "700MiB", "1GiB"),
    "lfm2.5-8b-a1b": ("700MiB", "1GiB", "1.5GiB"),
    "deepseek-v2-lite": ("1GiB", "1.5GiB", "2GiB"),
    "qwen3-30b-a3b": ("1.46GiB", "1.87GiB", "2.5GiB"),
}
LANES = (1, 2, 4, 8)
MOST = 0.0345


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="oneplus15")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    phone = load_phone(args.device)
    rows = [measure(phone, preset, memory, args.tokens) for preset, budgets in PAIRS.items() for memory in budgets]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(table(rows)))
    return int(any(row["regret"] > MOST for row in rows))


def measure(phone: Phone, preset: str, memory: str, tokens: int) -> dict[str, Any]:
    """One pair."""
    package = outline(preset)
    arch, pool, budget = package.architecture, package.pool, parse_size(memory)
    counts = draw_counts(arch.experts, arch.top_k, tokens, len(pool.moe_layers))
    ladder = default_plan(arch, experts=package.manifest.experts, dense=package.manifest.dense).ladder
    costs = NpuCosts(phone, sorted(ladder, key=lambda rung: -rung[1]))
    plan = solve(package, phone.profile, tokens, memory=budget, counts=counts, costs=costs)
    chosen = plan.configuration
    _, resident, _ = dense_bytes(package)
    paged = resident if chosen.dense_weights == "paged" else 0
    search = Search(package, phone.profile, costs, costs.workload(package, tokens, counts), paged)
    room = budget - (plan.peak_bytes - chosen.arena_bytes - chosen.pinned_bytes)
    found = {
        (one.group, one.banks, one.lanes, one.prefetch): search.predict(one).ttft_s
        for arena in (room, chosen.arena_bytes, chosen.arena_bytes // 2)
        for lanes in LANES
        for one in (replace(each, lanes=lanes) for each in configurations(pool, arena, lanes))
        if one.arena_bytes <= room
    }
    best = min(found, key=lambda one: found[one])
    return {
        "preset": preset,
        "memory": memory,
        "chosen": (chosen.group, chosen.banks, chosen.lanes, chosen.prefetch),
        "chosen_s": plan.prediction.ttft_s,
        "best": best,
        "best_s": found[best],
        "configurations": len(found),
        "regret": plan.prediction.ttft_s / found[best] - 1,
        "peak_bytes": plan.peak_bytes,
        "dense_weights": chosen.dense_weights,
    }


def table(rows: list[dict[str, Any]]) -> list[str]:
    lines = [
        "| model | budget | peak | chosen G, B, Q, prefetch | simulated | best of | G, B, Q, prefetch | simulated "
        "| regret |",
        "|" + " --- |" * 9,
    ]
    for row in rows:
        chosen, best = (", ".join(map(str, row[key])) for key in ("chosen", "best"))
        paged = ", dense paged" if row["dense_weights"] == "paged" else ""
        lines.append(
            f"| {row['preset']} | {row['memory']} | {format_bytes(row['peak_bytes'])}{paged} | {chosen} "
            f"| {format_seconds(row['chosen_s'])} | {row['configurations']} | {best} | {format_seconds(row['best_s'])} "
            f"| {100 * row['regret']:.2f} % |"
        )
    return lines


if __name__ == "__main__":
    sys.exit(main())
