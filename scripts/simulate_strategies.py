"""Every strategy on a simulated phone at equal memory: times, bubbles and memory by length of the prompt.

    python -m scripts.simulate_strategies
    python -m scripts.simulate_strategies --presets qwen3-30b-a3b --memory 1.87GiB --skew 1 --json

Exit status 1 where, in more than one cell, an exact strategy other than `resident`, which does not keep to the budget,
is faster than `estream`.
"""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from estream.errors import MemoryBudgetError
from estream.package.outline import outline
from estream.solver.load import draw_counts
from estream.solver.phone import Phone, load_phone
from estream.solver.simulate import SIMULATED, simulate_prefill
from estream.units import format_bytes, format_seconds, parse_size
from scripts.fit_phone import ladder_of

BUDGETS = {"olmoe-1b-7b": "1GiB", "lfm2.5-8b-a1b": "1.5GiB", "deepseek-v2-lite": "1.75GiB", "qwen3-30b-a3b": "1.87GiB"}
TOKENS = "256,512,1024,2048,4096"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="oneplus15")
    parser.add_argument("--presets", default=",".join(BUDGETS))
    parser.add_argument("--memory", help="of every preset (default: one of its own)")
    parser.add_argument("--tokens", default=TOKENS)
    parser.add_argument("--skew", type=float, default=0.0)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    phone = load_phone(args.device)
    rows = [
        cell(phone, preset, strategy, tokens, args.memory or BUDGETS[preset], args.skew)
        for preset in args.presets.split(",")
        for strategy in SIMULATED
        for tokens in map(int, args.tokens.split(","))
    ]
    print(json.dumps(rows, indent=1) if args.json else "\n".join(table(rows)))
    missed = losses(rows)
    for row in missed:
        print(f"{row['preset']}, {row['tokens']} tokens: {row['strategy']} is faster than estream", file=sys.stderr)
    return int(len(missed) > 1)


def cell(phone: Phone, preset: str, strategy: str, tokens: int, memory: str, skew: float) -> dict[str, Any]:
    """One strategy at one length; without figures where the budget has no room for it."""
    package = outline(preset)
    arch = package.architecture
    counts = draw_counts(arch.experts, arch.top_k, tokens, len(package.pool.moe_layers), skew=skew)
    budget = None if strategy == "resident" else parse_size(memory)
    found = {"preset": preset, "memory": memory, "strategy": strategy, "tokens": tokens}
    try:
        plan = simulate_prefill(package, phone, tokens, counts, ladder_of(preset), memory=budget, strategy=strategy)
    except MemoryBudgetError as refused:
        return found | {"refused": str(refused)}
    return found | {
        "ttft_s": plan.prediction.ttft_s,
        "bubble_rate": plan.prediction.bubble_rate,
        "bytes_read": plan.prediction.bytes_read,
        "peak_bytes": plan.peak_bytes,
    }


def losses(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Cells in which estream is beaten within the same memory."""
    own = {(row["preset"], row["tokens"]): row["ttft_s"] for row in rows if row["strategy"] == "estream"}
    return [
        row
        for row in rows
        if row["strategy"] not in ("estream", "resident")
        and row.get("ttft_s", float("inf")) < own[row["preset"], row["tokens"]] * (1 - 1e-9)
    ]


def table(rows: list[dict[str, Any]]) -> list[str]:
    lengths = list(dict.fromkeys(row["tokens"] for row in rows))
    lines = [
        "| model, budget | strategy | " + " | ".join(f"{length:,} tokens" for length in lengths) + " | peak |",
        "|" + " --- |" * (len(lengths) + 3),
    ]
    for preset, memory, strategy in dict.fromkeys((row["preset"], row["memory"], row["strategy"]) for row in rows):
        mine = [row for row in rows if (row["preset"], row["strategy"]) == (preset, strategy)]
        cells = [
            f"{format_seconds(row['ttft_s'])}, {100 * row['bubble_rate']:.0f} %" if "ttft_s" in row else "no room"
            for row in mine
        ]
        peak = max((row["peak_bytes"] for row in mine if "peak_bytes" in row), default=None)
        told = "" if peak is None else format_bytes(peak)
        lines.append(f"| {preset}, {memory} | {strategy} | {' | '.join(cells)} | {told} |")
    return lines


if __name__ == "__main__":
    sys.exit(main())
