"""Does an open engine get faster with the memory that it is given? The second prefill, by budget.

    python -m scripts.bench_budgets olmoe.estream --tokens 512 --memory 1GiB,2GiB,4GiB,8GiB --read-limit 800MB

One engine after the other (together they would not fit), each opened with nothing but its budget; after the first
prefill, which reads everything, --repeats more are measured. All budgets are gone through --rounds times. Needs root
for the limit.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine
from estream.units import format_bytes, parse_size
from scripts.bench.cgroups import Cgroup


def measure(package: Path, memory: int, tokens: int, repeats: int) -> dict[str, Any]:
    """The first prefill of an engine, and those that follow."""
    with Engine(package, memory=memory, max_tokens=tokens) as engine:
        ids = np.random.default_rng(0).integers(0, engine.package.architecture.vocab, tokens)
        first, *others = (engine.prefill(ids).stats for _ in range(1 + repeats))
        return {
            "memory": memory,
            "first_s": first.ttft_s,
            "again_s": [stats.ttft_s for stats in others],
            "again_bytes_read": others[-1].bytes_read,
            "peak_bytes": others[-1].memory.peak_bytes,
            "configuration": engine.configuration,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--memory", default="1GiB,2GiB,4GiB,8GiB", help="budgets, comma separated")
    parser.add_argument("--read-limit", metavar="RATE", help="bytes per second")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    rate = None if args.read_limit is None else parse_size(args.read_limit)
    runs: dict[str, list[dict[str, Any]]] = {text: [] for text in args.memory.split(",")}
    with Cgroup("estream-budgets", read_rate=rate, path=args.package) as group:
        if rate is not None:
            group.enter()
        for _ in range(args.rounds):
            for text, measured in runs.items():
                measured.append(measure(args.package, parse_size(text), args.tokens, args.repeats))
                again = ", ".join(f"{seconds:.2f}" for seconds in measured[-1]["again_s"])
                print(f"  {text}: first {measured[-1]['first_s']:.2f} s, then {again}", file=sys.stderr, flush=True)
    if args.out:
        args.out.write_text(json.dumps({"package": args.package.name, "read_limit": rate, "runs": runs}, indent=1))
    print(f"{args.package.name}, {args.tokens} tokens, reads limited to {args.read_limit or 'nothing'}")
    print(f"{'memory':>8} {'pinned':>10} {'read again':>11} {'second prefill':>15} {'of the one before':>18}")
    before = None
    for text, measured in runs.items():
        again = statistics.median(seconds for run in measured for seconds in run["again_s"])
        pinned = format_bytes(measured[0]["configuration"]["pinned_bytes"])
        read = format_bytes(measured[0]["again_bytes_read"])
        share = "" if before is None else f"{again / before:.3f}"
        print(f"{text:>8} {pinned:>10} {read:>11} {again:13.2f} s {share:>18}")
        before = again


if __name__ == "__main__":
    main()
