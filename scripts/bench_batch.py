"""Several short prompts in one pass, against one long prompt and against one after the other.

    python -m scripts.bench_batch olmoe.estream --prompts 32 --tokens 23 --rounds 5

One engine, streaming; in every round one prompt as long as all together, then the batch. The prompts one after the
other are measured --alone times (they take longest). The batch's logits must be those of the single runs, bit for bit
where the experts are integers.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """(seconds, result)."""
    started = time.perf_counter()
    result = work()
    return time.perf_counter() - started, result


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--prompts", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=23)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--alone", type=int, default=1, help="rounds of the prompts one after the other")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    total = args.prompts * args.tokens
    with Engine(args.package, max_tokens=total) as engine:
        vocab = engine.package.architecture.vocab
        prompts = list(np.random.default_rng(0).integers(0, vocab, (args.prompts, args.tokens)))
        long = np.concatenate(prompts)
        engine.prefill(long)  # the arena's memory is touched
        times: dict[str, list[float]] = {"one long prompt": [], "batch": [], "one after the other": []}
        for number in range(args.rounds):
            times["one long prompt"].append(timed(lambda: engine.prefill(long))[0])
            seconds, together = timed(lambda: engine.prefill_batch(prompts))
            times["batch"].append(seconds)
            if number < args.alone:
                seconds, single = timed(lambda: [engine.prefill(ids) for ids in prompts])
                times["one after the other"].append(seconds)
                pairs = zip(together, single, strict=True)
                error = max(float(np.abs(a.logits - b.logits).max() / np.ptp(b.logits)) for a, b in pairs)
            print(f"  round {number + 1}: { ({name: rounds[-1] for name, rounds in times.items()}) }", file=sys.stderr)
        configuration = engine.configuration
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    report = {"configuration": configuration, "times": times, "medians": medians, "logits_error": error}
    if args.out:
        args.out.write_text(json.dumps(report, indent=1))
    print(f"{args.package.name}: {args.prompts} prompts of {args.tokens} tokens, medians of {args.rounds} rounds")
    for name, seconds in medians.items():
        print(f"  {name:<20} {seconds:8.2f} s   batch takes {medians['batch'] / seconds:.3f} of it")
    print(f"  largest difference of logits, of their range: {error:.2g}")


if __name__ == "__main__":
    main()
