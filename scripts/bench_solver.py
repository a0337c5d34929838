"""Is the solver's prediction right, and its choice the best? Predicted against measured, and against a sweep.

    python -m scripts.bench_solver olmoe4.estream mixtral2.estream --tokens 128,512 --memory 500MiB,1GiB \
        --read-limit 800MB --out solver.jsonl

For every package, length and budget: the machine is calibrated under the read limit, the solver chooses, every
configuration of the sweep (G in powers of two, B that fill the budget's arena or half of it, Q of 1, 2 and 4, both ways
to start) is measured once, and the best 12 and the solver's choice four times more, interleaved. Regret is the
choice's median over the best median, 0 where their interquartile ranges overlap. Results are lines of JSON, one per
pair: an interrupted run goes on where it stopped. A read limit needs root.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine
from estream.calibrate import calibrate
from estream.package.reader import Package
from estream.solver.automatic import Configuration
from estream.solver.profile import DeviceProfile
from estream.solver.search import Plan, configurations, solve
from estream.units import format_bytes, format_seconds, parse_size
from scripts.bench.cgroups import Cgroup

BEST, MORE = 12, 4
IDLE_S = (
    0.3  # before a run: a rate limit gives credit by slices of 0.1 s, and what the run before left of one is chance
)
LANES = (1, 2, 4)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", metavar="PACKAGE", type=Path, nargs="+")
    parser.add_argument("--tokens", default="512")
    parser.add_argument("--memory", default="1GiB", help="budgets, comma separated")
    parser.add_argument("--read-limit", metavar="RATE", help="bytes per second, for all of it")
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; what is there is not measured again")
    args = parser.parse_args()
    rate = None if args.read_limit is None else parse_size(args.read_limit)
    lines = args.out.read_text().splitlines() if args.out.exists() else []
    done = {tuple(one["pair"]): one for one in map(json.loads, lines)}
    with Cgroup("estream-solver", read_rate=rate, path=args.packages[0]) as group:
        if rate is not None:
            group.enter()
        for path in args.packages:
            profile: DeviceProfile | None = None
            for tokens in map(int, args.tokens.split(",")):
                for memory in args.memory.split(","):
                    pair = (path.name, tokens, memory, args.read_limit)
                    if pair not in done:
                        profile = profile or calibrate(path)
                        done[pair] = measure(path, profile, tokens, parse_size(memory)) | {"pair": pair}
                        with args.out.open("a") as file:
                            file.write(json.dumps(done[pair]) + "\n")
                    print(line(done[pair]), flush=True)
    results = list(done.values())
    regrets = sorted(one["regret"] for one in results)
    near = sum(abs(one["prediction_error"]) <= 0.1 for one in results)
    median, worst = regrets[len(regrets) // 2], regrets[-1]
    print(f"{near} of {len(results)} predictions within 10 %; regret: median {median:.1%}, worst {worst:.1%}")


def measure(path: Path, profile: DeviceProfile, tokens: int, memory: int) -> dict[str, Any]:
    """One pair: the plan, the sweep, the best again."""
    package = Package.open(path)
    plan = solve(package, profile, tokens, memory=memory)
    chosen = key(plan.configuration)
    times: dict[tuple[int, int, int, str], list[float]] = {one: [] for one in sweep(package, plan)}
    times.setdefault(chosen, [])
    for number, one in enumerate(times):
        with opened(path, tokens, one) as engine:
            times[one].append(run(engine, tokens))
        print(f"  {number + 1} of {len(times)}: {one} {times[one][-1]:.3f} s", file=sys.stderr, flush=True)
    best = sorted(times, key=lambda one: times[one][0])[:BEST]
    with ExitStack() as stack:
        engines = {one: stack.enter_context(opened(path, tokens, one)) for one in dict.fromkeys([*best, chosen])}
        for _ in range(MORE):
            for one, engine in engines.items():
                times[one].append(run(engine, tokens))
    again = [one for one in times if len(times[one]) > 1]
    fastest = min(again, key=lambda one: statistics.median(times[one]))
    own, least = statistics.median(times[chosen]), statistics.median(times[fastest])
    equal = np.percentile(times[chosen], 25) <= np.percentile(times[fastest], 75)
    return {
        "chosen": chosen,
        "fastest": fastest,
        "predicted_s": plan.prediction.ttft_s,
        "measured_s": own,
        "fastest_s": least,
        "prediction_error": plan.prediction.ttft_s / own - 1,
        "regret": 0.0 if equal else own / least - 1,
        "predicted_bubble": plan.prediction.bubble_rate,
        "peak_bytes": plan.peak_bytes,
        "times": [[one, seconds] for one, seconds in times.items()],
        "at": time.strftime("%Y-%m-%dT%H:%M:%S"),
    }


def sweep(package: Package, plan: Plan) -> Iterator[tuple[int, int, int, str]]:
    """Configurations that fit where the solver's does."""
    room = max(plan.configuration.arena_bytes, package.pool.panel.panel_bytes)
    for arena in (room, room // 2):
        for lanes in LANES:
            for one in configurations(package.pool, arena, lanes):
                if one.arena_bytes <= room:
                    yield key(one)


def key(one: Configuration) -> tuple[int, int, int, str]:
    return one.group, one.banks, one.lanes, one.prefetch


def opened(path: Path, tokens: int, one: tuple[int, int, int, str]) -> Engine:
    """An engine that has run once."""
    group, banks, lanes, prefetch = one
    engine = Engine(path, group=group, banks=banks, lanes=lanes, prefetch=prefetch, max_tokens=tokens)
    engine.prefill([1], logits=None)
    return engine


def run(engine: Engine, tokens: int) -> float:
    """Seconds of a prefill."""
    ids = np.random.default_rng(0).integers(0, engine.package.architecture.vocab, tokens)
    time.sleep(IDLE_S)
    seconds = engine.prefill(ids).stats.ttft_s
    assert seconds is not None
    return seconds


def line(one: dict[str, Any]) -> str:
    name, tokens, memory, limit = one["pair"]
    predicted, measured, fastest = (format_seconds(one[f"{key}_s"]) for key in ("predicted", "measured", "fastest"))
    return (
        f"{name} {tokens} tokens in {memory}, reads {limit or 'unlimited'}: predicted {predicted}, measured {measured} "
        f"({one['prediction_error']:+.1%}); chose {one['chosen']}, fastest {one['fastest']} {fastest}: "
        f"regret {one['regret']:.1%}; peak {format_bytes(one['peak_bytes'])}"
    )


if __name__ == "__main__":
    main()
