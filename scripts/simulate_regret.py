"""Is the solver's choice the best on a simulated phone? Against every configuration, for 12 pairs of model and budget.

    python -m scripts.simulate_regret
    python -m scripts.simulate_regret --skew 1                         # routing that the solver was not told of
    python -m scripts.simulate_regret --device oneplus12 --tokens 512 --json

The solver chooses as `estream plan` does, with uniform routing. Every configuration: G in powers of two and half-way
between them, up to 64 MiB a group; the B that fill the budget's room, the chosen arena, and half of it; Q of 1, 2 and
4; both ways to start; with the same dense weights and nothing pinned, like the choice. Regret is the time of the choice
over the least of all, less 1. Exit status 1 where a regret is above 3.45 %.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator
from itertools import product
from typing import Any

from estream.layers.weights import dense_bytes
from estream.package.layout import PoolLayout
from estream.package.outline import outline
from estream.solver.automatic import Configuration
from estream.solver.load import draw_counts
from estream.solver.npu import NpuCosts
from estream.solver.phone import Phone, load_phone
from estream.solver.search import Search, solve
from estream.units import format_bytes, format_seconds, parse_size
from scripts.fit_phone import ladder_of

PAIRS = {
    "olmoe-1b-7b": ("500MiB", "700MiB", "1GiB"),
    "lfm2.5-8b-a1b": ("700MiB", "1GiB", "1.5GiB"),
    "deepseek-v2-lite": ("1GiB", "1.5GiB", "2GiB"),
    "qwen3-30b-a3b": ("1.46GiB", "1.87GiB", "2.5GiB"),
}
LANES = (1, 2, 4)
LARGEST = 64 << 20
MOST = 0.0345


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="oneplus15")
    parser.add_argument("--tokens", type=int, default=1024)
    parser.add_argument("--skew", type=float, default=0.0, help="of the routing (default 0: uniform)")
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    phone = load_phone(args.device)
    rows = [
        measure(phone, preset, memory, args.tokens, args.skew)
        for preset, budgets in PAIRS.items()
        for memory in budgets
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
    else:
        print("\n".join(table(rows)))
    return int(any(row["regret"] > MOST for row in rows))


def measure(phone: Phone, preset: str, memory: str, tokens: int, skew: float) -> dict[str, Any]:
    """One pair."""
    package, profile = outline(preset), phone.profile
    arch, pool, budget = package.architecture, package.pool, parse_size(memory)
    costs = NpuCosts(phone, ladder_of(preset))
    plan = solve(package, profile, tokens, memory=budget, costs=costs)
    chosen = plan.configuration
    _, resident, _ = dense_bytes(package)
    counts = draw_counts(arch.experts, arch.top_k, tokens, len(pool.moe_layers), skew=skew, seed=int(skew > 0))
    work = costs.workload(package, tokens, counts)
    search = Search(package, profile, costs, work, resident if chosen.dense_weights == "paged" else 0)
    room = budget - (plan.peak_bytes - chosen.arena_bytes - chosen.pinned_bytes)
    arenas = (room, min(room, chosen.arena_bytes), chosen.arena_bytes // 2)
    space = {(one.group, one.banks, one.lanes, one.prefetch): one for one in every(pool, arenas)}
    found = {key: search.predict(one).ttft_s for key, one in space.items()}
    own = search.predict(chosen).ttft_s
    best = min(found, key=lambda one: found[one])
    return {
        "preset": preset,
        "memory": memory,
        "chosen": (chosen.group, chosen.banks, chosen.lanes, chosen.prefetch),
        "chosen_s": own,
        "best": best,
        "best_s": found[best],
        "configurations": len(found),
        "regret": own / found[best] - 1,
        "peak_bytes": plan.peak_bytes,
        "dense_weights": chosen.dense_weights,
    }


def every(pool: PoolLayout, arenas: tuple[int, ...]) -> Iterator[Configuration]:
    """Configurations whose arena fits."""
    groups = {size for power in range(12) for size in (1 << power, 3 << power)}
    for group in sorted(size for size in groups if size <= pool.panels_per_layer):
        bank = group * pool.panel.panel_bytes
        for banks in {arena // bank for arena in arenas} if group == 1 or bank <= LARGEST else ():
            for lanes, prefetch in product(LANES, ("before-routing", "after-routing")):
                if banks:
                    yield Configuration(group, banks, lanes, prefetch, "none", bank, banks * bank)


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
