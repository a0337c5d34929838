#!/usr/bin/env python3
"""Feeds EStream's readers with hostile bytes: no crash, no hang, no wrong success.

    scripts/fuzz.py                                      # 100,000 inputs for each format
    scripts/fuzz.py --format header --count 1000 --seed 7
    scripts/fuzz.py --format header --seed 7 --only 123  # one input again, with its traceback

Every input is made from the seed and its number. A child process judges them; this one watches it, so that a crash of
the interpreter or a loop in C code is found too. Exit status 1 after a finding.
"""

from __future__ import annotations

import argparse
import multiprocessing
import multiprocessing.sharedctypes
import resource
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from tests.support.fuzz_formats import FORMATS, generator

HANG_S = 10.0
MEMORY_BYTES = 8 << 30  # of address space: a memory bomb must fail here, not take the machine


def work(name: str, seed: int, first: int, count: int, folder: Path, state: Any, results: Any) -> None:
    """Judges the inputs and sends what was found. `state`: number of the input, and when it began."""
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY_BYTES, MEMORY_BYTES))
    counts: Counter[str] = Counter()
    slowest = (0.0, -1)
    form = FORMATS[name](folder)
    results.put(("ready", None))
    for number in range(first, first + count):
        data = form.make(generator(seed, number))
        started = time.monotonic()
        state[0], state[1] = float(number), started
        try:
            refused = form.judge(data)
            counts["accepted" if refused is None else "refused"] += 1
        except BaseException as problem:
            results.put(("finding", (number, f"{type(problem).__name__}: {str(problem)[:300]}")))
            counts["findings"] += 1
        state[1] = 0.0
        slowest = max(slowest, (time.monotonic() - started, number))
    results.put(("done", (counts, slowest)))


def fuzz(name: str, seed: int, count: int, folder: Path) -> bool:
    """Fuzzes one format and prints what came of it. True if nothing was found."""
    context = multiprocessing.get_context("fork")
    state = multiprocessing.sharedctypes.RawArray("d", 2)
    started, first, clean = time.monotonic(), 0, True
    counts: Counter[str] = Counter()
    slowest = (0.0, -1)
    while first < count:
        results = context.SimpleQueue()
        child = context.Process(
            target=work, args=(name, seed, first, count - first, folder / f"{name}-{first}", state, results)
        )
        state[0], state[1] = float(first), 0.0
        child.start()
        done = ready = False
        while not done:
            child.join(0.2)
            alive = child.is_alive()
            while not results.empty():
                kind, value = results.get()
                ready = True
                if kind == "finding":
                    clean = False
                    print(f"{name}: {value[1]}\n  again: --format {name} --seed {seed} --only {value[0]}")
                elif kind == "done":
                    done = True
                    counts += value[0]
                    slowest = max(slowest, value[1])
            began = state[1]  # read once: the child goes on
            hung = began > 0 and time.monotonic() - began > HANG_S
            if hung or (not alive and not done):
                clean = False
                child.kill()
                child.join()
                what = f"hangs for more than {HANG_S:g} s" if hung else f"ended the process ({child.exitcode})"
                print(f"{name}: input {int(state[0])} {what}")
                if not ready:
                    return False  # it is not the input's fault
                counts["findings"] += 1
                break
        child.join()
        first = count if done else int(state[0]) + 1
    seconds = time.monotonic() - started
    print(
        f"{name}: {count} inputs in {seconds:.0f} s, {counts['refused']} refused, "
        f"{counts['accepted']} accepted rightly, {counts['findings']} findings; "
        f"slowest {slowest[0]:.2f} s (input {slowest[1]})",
        flush=True,
    )
    return clean


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--format", choices=sorted(FORMATS), action="append", help="default: all of them")
    parser.add_argument("--count", type=int, default=100_000, help="inputs per format (default 100000)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--only", type=int, metavar="N", help="input number N alone, in this process")
    args = parser.parse_args()
    names = args.format or list(FORMATS)
    if args.only is not None:
        with tempfile.TemporaryDirectory() as folder:
            form = FORMATS[names[0]](Path(folder) / names[0])
            data = form.make(generator(args.seed, args.only))
            print(f"{len(data)} bytes: {data[:2000]!r}")
            print(form.judge(data) or "accepted")
        return 0
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None) as folder:  # ours: a child may be killed
        return 0 if all([fuzz(name, args.seed, args.count, Path(folder)) for name in names]) else 1


if __name__ == "__main__":
    sys.exit(main())
