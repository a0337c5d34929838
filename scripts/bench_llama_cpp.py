"""EStream against llama.cpp on this machine's cores: the same shape, the same cores, the same memory limits, in turn.

    python -m scripts.bench_llama_cpp olmoe.estream --llama-bench build/bin/llama-bench --work DIR
    python -m scripts.bench_llama_cpp olmoe.estream --build DIR    # builds llama-bench from llama-cpp-python's source

llama.cpp gets random weights of the package's shape (scripts/bench/gguf_model.py) as Q4_0 and Q8_0. For every setting
(resident, or a memory cgroup without swap) and length its variants (scheme × -ub × repacking) run once, given up where
they take half as long again as the fastest before them; the fastest then runs --rounds times, in turn with EStream
streaming the package. llama-bench warms up before it measures, EStream does not; loading is left out on both sides. The
page cache is dropped before each run in a cgroup (pages that others cached are not charged to it). Needs root, and
12 GB of disk.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import statistics
import subprocess
import sys
import threading
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from estream.units import format_bytes, parse_size
from scripts.bench.cgroups import Cgroup
from scripts.bench.gguf_model import SCHEMES, write_gguf
from scripts.bench.llama_build import build_llama_bench
from scripts.bench_memory import drop_page_cache

UBATCHES = (512, 2048)
_HOPELESS = 1.5  # times the fastest variant so far, loading included: a slower one is given up


@dataclass(frozen=True)
class Variant:
    """How llama.cpp runs."""

    scheme: str
    ubatch: int
    repack: bool

    def __str__(self) -> str:
        return f"{self.scheme} -ub {self.ubatch}{' repacked' if self.repack else ''}"


@dataclass(frozen=True)
class Run:
    """One prefill in a process of its own; tokens_per_s is 0 and `failure` set where it did not finish."""

    tokens_per_s: float
    peak_bytes: int
    failure: str = ""


class Rivals:
    """Both programs, on the same threads."""

    def __init__(self, args: argparse.Namespace, binary: Path) -> None:
        self._args, self._binary, self.timeout = args, binary, args.timeout
        self.only = args.variants.split(",") if args.variants else []
        model = json.loads((args.package / "model.json").read_text())
        config = model["config"] | {"model_type": model["family"]}
        self._vocab = config["vocab_size"]
        self._files = {scheme: args.work / f"{args.package.stem}.{scheme}.gguf" for scheme in SCHEMES}
        for scheme, file in self._files.items():
            if not file.exists():
                print(f"writing {file}", file=sys.stderr)
                write_gguf(config, file, scheme)

    def llama(self, variant: Variant, tokens: int, memory: int | None, timeout: float | None = None) -> Run:
        command = [self._binary, "-m", self._files[variant.scheme], "-p", tokens, "-n", 0, "-r", 1, "-o", "json"]
        command += ["-t", self._args.threads, "-b", 2048, "-ub", variant.ubatch, "--repack", int(variant.repack)]
        done, peak, failure = self._run(command, memory, timeout=timeout)
        return Run(0.0 if failure else float(json.loads(done)[0]["avg_ts"]), peak, failure)

    def estream(self, tokens: int, memory: int | None) -> Run:
        command = [sys.executable, "-m", "estream", "prefill", self._args.package, "--ids-file", "-"]
        command += ["--threads", self._args.threads, "--json", "--quiet"]
        if memory is not None:
            command += ["--memory", memory]
        ids = " ".join(map(str, np.random.default_rng(0).integers(0, self._vocab, tokens)))
        done, peak, failure = self._run(command, memory, ids)
        return Run(0.0 if failure else tokens / json.loads(done)["stats"]["ttft_s"], peak, failure)

    def _run(
        self, command: list[Any], memory: int | None, stdin: str = "", timeout: float | None = None
    ) -> tuple[str, int, str]:
        """(stdout, peak bytes of the cgroup or, without one, of the process, why it did not finish)."""
        if memory is not None:
            drop_page_cache()
        with Cgroup("estream-rivals", memory=memory) as group:
            pipe = subprocess.PIPE
            words = [str(part) for part in command]
            process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True, preexec_fn=group.enter)
            resident = [0]
            threading.Thread(target=watch_peak, args=(process.pid, resident), daemon=True).start()
            failure, timeout = "", self._args.timeout if timeout is None else timeout
            try:
                out, err = process.communicate(stdin, timeout=timeout)
            except subprocess.TimeoutExpired:
                process.kill()
                out, err = process.communicate()
                failure = f"not finished in {timeout:.0f} s"
            if process.returncode and not failure:
                failure = "killed for memory" if process.returncode == -9 else err.strip()[-300:]
            return out, group.memory_peak() or resident[0], failure


def watch_peak(pid: int, peak: list[int]) -> None:
    """Keeps the kernel's count of a process's largest resident memory, mapped files included, until it ends."""
    status = Path(f"/proc/{pid}/status")
    while True:
        try:
            lines = status.read_text().splitlines()
        except OSError:
            return
        kibibytes = [int(line.split()[1]) for line in lines if line.startswith("VmHWM")]
        if not kibibytes:  # a zombie has no memory
            return
        peak[0] = kibibytes[0] << 10
        time.sleep(0.02)


def compare(rivals: Rivals, tokens: int, memory: int | None, rounds: int) -> dict[str, Any]:
    """llama.cpp's variants once, then its fastest against EStream."""
    screened: list[tuple[Variant, Run]] = []
    shortest = float(rivals.timeout)
    # Without repacking first: under a memory limit repacked weights thrash or do not fit.
    for repack, scheme, ubatch in itertools.product((False, True), SCHEMES, UBATCHES):
        variant = Variant(scheme, ubatch, repack)
        if variant.ubatch > tokens and variant.ubatch != min(UBATCHES):
            continue  # a batch longer than the prompt is the prompt
        if rivals.only and str(variant) not in rivals.only:
            continue
        started = time.monotonic()
        run = rivals.llama(variant, tokens, memory, min(_HOPELESS * shortest, rivals.timeout))
        if not run.failure:
            shortest = min(shortest, time.monotonic() - started)
        screened.append((variant, run))
        print(f"  {variant}: {run.failure or f'{run.tokens_per_s:.1f} tokens/s'}", file=sys.stderr, flush=True)
    best = max(screened, key=lambda one: one[1].tokens_per_s)[0]
    pairs = []
    for _ in range(rounds):
        pairs.append((rivals.llama(best, tokens, memory), rivals.estream(tokens, memory)))
        theirs, ours = pairs[-1]
        if theirs.failure or ours.failure:
            raise SystemExit(f"llama.cpp: {theirs.failure or 'done'}; EStream: {ours.failure or 'done'}")
        print(f"  {best} {theirs.tokens_per_s:.1f}, EStream {ours.tokens_per_s:.1f}", file=sys.stderr, flush=True)
    return {
        "tokens": tokens,
        "memory_limit": memory,
        "screened": [asdict(variant) | asdict(run) for variant, run in screened],
        "best": str(best),
        "llama_tokens_per_s": statistics.median(theirs.tokens_per_s for theirs, _ in pairs),
        "estream_tokens_per_s": statistics.median(ours.tokens_per_s for _, ours in pairs),
        "ratio": statistics.median(ours.tokens_per_s / theirs.tokens_per_s for theirs, ours in pairs),
        "llama_peak_bytes": max(theirs.peak_bytes for theirs, _ in pairs),
        "estream_peak_bytes": max(ours.peak_bytes for _, ours in pairs),
        "rounds": [[asdict(theirs), asdict(ours)] for theirs, ours in pairs],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    binary = parser.add_mutually_exclusive_group(required=True)
    binary.add_argument("--llama-bench", type=Path, metavar="FILE")
    binary.add_argument("--build", type=Path, metavar="DIR", help="build llama-bench there (cmake, a C++ compiler)")
    parser.add_argument("--work", type=Path, default=Path("."), help="where the GGUF files go")
    parser.add_argument("--tokens", default="512,2048")
    parser.add_argument("--memory", default="none,1GiB", help="limits, comma separated; none: resident")
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--variants", help='those alone, comma separated: "q4_0 -ub 512 repacked"')
    parser.add_argument("--timeout", type=int, default=300, help="seconds after which a run of llama.cpp is given up")
    parser.add_argument("--out", type=Path, help="write JSON here")
    args = parser.parse_args()
    args.work.mkdir(parents=True, exist_ok=True)
    rivals = Rivals(args, args.llama_bench or build_llama_bench(args.build))
    cells = []
    for memory, tokens in itertools.product(args.memory.split(","), map(int, args.tokens.split(","))):
        print(f"{tokens} tokens, memory {memory}", file=sys.stderr)
        cells.append(compare(rivals, tokens, None if memory == "none" else parse_size(memory), args.rounds))
        if args.out:
            report = {"package": args.package.name, "threads": args.threads, "cells": cells}
            args.out.write_text(json.dumps(report, indent=1))
    print(f"{args.package.name}, {args.threads} threads, medians of {args.rounds} interleaved rounds, tokens/s")
    print(f"{'memory':>10} {'tokens':>6} {'llama.cpp, its best':>28} {'EStream':>8} {'ratio':>6} {'peaks':>20}")
    for cell in cells:
        memory = "resident" if cell["memory_limit"] is None else format_bytes(cell["memory_limit"])
        peaks = f"{format_bytes(cell['llama_peak_bytes'])}, {format_bytes(cell['estream_peak_bytes'])}"
        theirs = f"{cell['best']} {cell['llama_tokens_per_s']:.1f}"
        print(
            f"{memory:>10} {cell['tokens']:6d} {theirs:>28} {cell['estream_tokens_per_s']:8.1f}"
            f" {cell['ratio']:6.2f} {peaks:>20}"
        )


if __name__ == "__main__":
    main()
