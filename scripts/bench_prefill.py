"""Flash alone, resident, streamed: the three times whose ratio says whether reading hides behind compute.

    python scripts/bench_prefill.py olmoe.estream --tokens 512,2048 --read-limits 400M,800M --rounds 5

All three run in one process with both engines open (dense weights warm on both sides), interleaved; the table gives
medians and TTFT ÷ max(flash alone, resident). Under a read limit the process enters a block-I/O cgroup (needs root).
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parent))
from bench.cgroups import Cgroup

from estream import Engine
from estream.units import format_bytes, parse_size


def flash_alone(engine: Engine) -> float:
    """Seconds to read the whole pool through the engine's own lanes and banks, with nobody computing."""
    stream, pool = engine.experts, engine.package.pool
    needed = np.ones(pool.panels_per_layer, bool)
    started = time.perf_counter()
    stream.begin()
    for layer in pool.moe_layers:
        stream.routes(layer, needed)
        for ready in stream.groups(layer):
            ready.release()
    stream.end()
    return time.perf_counter() - started


def measure(streamed: Engine, resident: Engine, tokens: int, rounds: int, seed: int) -> dict[str, Any]:
    """Medians and every round of the three times, for one prompt length."""
    ids = np.random.default_rng(seed).integers(0, streamed.package.architecture.vocab, tokens)
    rows = []
    for _ in range(rounds):
        flash = flash_alone(streamed)
        held = resident.prefill(ids)
        paged = streamed.prefill(ids)
        if not np.array_equal(held.logits, paged.logits):
            raise SystemExit("streamed and resident logits differ")
        rows.append(
            {
                "flash_s": flash,
                "resident_s": held.stats.ttft_s,
                "streamed_s": paged.stats.ttft_s,
                "bubble_rate": paged.stats.to_dict()["bubble_rate"],
                "ratio": paged.stats.ttft_s / max(flash, held.stats.ttft_s),
            }
        )
        print(f"  {tokens:5d} tokens  " + "  ".join(f"{k} {v:.3f}" for k, v in rows[-1].items()), file=sys.stderr)
    medians = {key: statistics.median(row[key] for row in rows) for key in rows[0]}
    medians["ratio_of_medians"] = medians["streamed_s"] / max(medians["flash_s"], medians["resident_s"])
    return {"tokens": tokens, "median": medians, "rounds": rows}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--read-limits", default="none", help="bytes/s, comma separated; none: unthrottled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write JSON here")
    for name in ("group", "banks", "lanes"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    lengths = [int(text) for text in options.tokens.split(",")]
    knobs = {name: getattr(options, name) for name in ("group", "banks", "lanes")}
    report: dict[str, Any] = {"cells": []}
    with (
        Engine(options.package, max_tokens=max(lengths), **knobs) as streamed,
        Engine(options.package, max_tokens=max(lengths), resident="all") as resident,
    ):
        report["configuration"] = streamed.configuration
        for limit in options.read_limits.split(","):
            rate = None if limit == "none" else parse_size(limit)
            with Cgroup("estream-bench", read_rate=rate, path=options.package) as group:
                if rate is not None:
                    group.enter()
                for tokens in lengths:
                    cell = measure(streamed, resident, tokens, options.rounds, options.seed)
                    report["cells"].append({"read_limit": rate, **cell})
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    arena = format_bytes(int(report["configuration"]["arena_bytes"]))
    print(f"{options.package.name}, arena {arena}, medians of {options.rounds} interleaved rounds")
    print(f"{'limit':>12} {'tokens':>7} {'flash':>8} {'resident':>9} {'streamed':>9} {'ratio':>6} {'bubble':>7}")
    for cell in report["cells"]:
        m = cell["median"]
        limit = "none" if cell["read_limit"] is None else f"{format_bytes(cell['read_limit'])}/s"
        print(
            f"{limit:>12} {cell['tokens']:7d} {m['flash_s']:8.2f} {m['resident_s']:9.2f} {m['streamed_s']:9.2f}"
            f" {m['ratio']:6.3f} {m['bubble_rate']:7.3f}"
        )


if __name__ == "__main__":
    main()
