"""Flash alone, resident, streamed: the three times whose ratio says whether reading hides behind compute.

    python -m scripts.bench_prefill olmoe.estream --tokens 512,2048 --read-limits 400M,800M --rounds 5

All three run in one process with both engines open (dense weights warm on both sides), interleaved; the table gives
medians and TTFT ÷ max(flash alone, resident). Under a read limit the process enters a block-I/O cgroup (needs root).
--prefetch names the ways to start a streamed prefill, comma separated; the table has a line for each.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine
from estream.units import format_bytes, parse_size
from scripts.bench.cgroups import Cgroup


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


Cells = list[dict[str, Any]]


def measure(streamed: dict[str, Engine], resident: Engine, tokens: int, rounds: int, seed: int) -> Cells:
    """Medians and every round of the three times for one prompt length, for each engine by its prefetch mode."""
    ids = np.random.default_rng(seed).integers(0, resident.package.architecture.vocab, tokens)
    rows: dict[str, list[dict[str, float]]] = {mode: [] for mode in streamed}
    for _ in range(rounds):
        flash = flash_alone(next(iter(streamed.values())))
        held = resident.prefill(ids)
        for mode, engine in streamed.items():
            paged = engine.prefill(ids)
            if not np.array_equal(held.logits, paged.logits):
                raise SystemExit("streamed and resident logits differ")
            assert held.stats.ttft_s and paged.stats.ttft_s
            row = {
                "flash_s": flash,
                "resident_s": held.stats.ttft_s,
                "streamed_s": paged.stats.ttft_s,
                "bubble_rate": float(paged.stats.to_dict()["bubble_rate"]),
                "ratio": paged.stats.ttft_s / max(flash, held.stats.ttft_s),
            }
            rows[mode].append(row)
            said = "  ".join(f"{key} {value:.3f}" for key, value in row.items())
            print(f"  {tokens:5d} tokens, {mode}  {said}", file=sys.stderr, flush=True)
    cells = []
    for mode, measured in rows.items():
        medians = {key: statistics.median(row[key] for row in measured) for key in measured[0]}
        medians["ratio_of_medians"] = medians["streamed_s"] / max(medians["flash_s"], medians["resident_s"])
        cells.append({"tokens": tokens, "prefetch": mode, "median": medians, "rounds": measured})
    return cells


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--read-limits", default="none", help="bytes/s, comma separated; none: unthrottled")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, help="write JSON here")
    parser.add_argument("--prefetch", default="auto", help="modes, comma separated (default auto)")
    for name in ("group", "banks", "lanes"):
        parser.add_argument(f"--{name}", type=int)
    options = parser.parse_args()
    lengths = [int(text) for text in options.tokens.split(",")]
    knobs = {name: getattr(options, name) for name in ("group", "banks", "lanes")}
    report: dict[str, Any] = {"cells": []}
    with contextlib.ExitStack() as opened:
        streamed = {
            mode: opened.enter_context(Engine(options.package, max_tokens=max(lengths), prefetch=mode, **knobs))
            for mode in options.prefetch.split(",")
        }
        resident = opened.enter_context(Engine(options.package, max_tokens=max(lengths), resident="all"))
        report["configuration"] = next(iter(streamed.values())).configuration
        for limit in options.read_limits.split(","):
            rate = None if limit == "none" else parse_size(limit)
            with Cgroup("estream-bench", read_rate=rate, path=options.package) as group:
                if rate is not None:
                    group.enter()
                for tokens in lengths:
                    cells = measure(streamed, resident, tokens, options.rounds, options.seed)
                    report["cells"] += [{"read_limit": rate, **cell} for cell in cells]
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    arena = format_bytes(int(report["configuration"]["arena_bytes"]))
    print(f"{options.package.name}, arena {arena}, medians of {options.rounds} interleaved rounds")
    columns = ("limit", "tokens", "prefetch", "flash", "resident", "streamed", "ratio", "bubble")
    print(" ".join(f"{name:>{15 if name == 'prefetch' else 10}}" for name in columns))
    for cell in report["cells"]:
        m = cell["median"]
        limit = "none" if cell["read_limit"] is None else f"{format_bytes(cell['read_limit'])}/s"
        times = " ".join(f"{m[key]:10.2f}" for key in ("flash_s", "resident_s", "streamed_s"))
        rates = f"{m['ratio']:10.3f} {m['bubble_rate']:10.3f}"
        print(f"{limit:>10} {cell['tokens']:10d} {cell['prefetch']:>15} {times} {rates}")


if __name__ == "__main__":
    main()
