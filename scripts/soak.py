#!/usr/bin/env python3
"""Many prefills of mixed lengths in one process: memory, threads and file descriptors must not grow.

    scripts/soak.py [PACKAGE] [--prefills 1000]

Without a package a tiny random one is made. The first half of the prefills warms up caches and allocator; what the
process holds afterwards is compared with what it holds at the end. One prefill in ten fails on purpose (a token id out
of range, an interrupt). Exit status 1 if anything grew.
"""

from __future__ import annotations

import argparse
import os
import random
import sys
import tempfile
import threading
from dataclasses import dataclass
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from estream import Engine, EStreamError
from estream.package.pack import pack
from estream.telemetry.memory import process_memory
from estream.units import format_bytes

SLACK_BYTES = 4 << 20  # the allocator's own noise; 1,000 leaks of one row of a tiny model are more


@dataclass(frozen=True)
class Held:
    """What the process holds: resident and swapped bytes, threads, open files."""

    memory: int
    threads: int
    files: int

    @classmethod
    def now(cls) -> Held:
        memory = process_memory().rss_plus_swap_bytes
        if memory is None:
            raise SystemExit("this system does not say how much memory the process holds (/proc/self/status)")
        return cls(memory, threading.active_count(), len(os.listdir("/proc/self/fd")))

    def __str__(self) -> str:
        return f"{format_bytes(self.memory)}, {self.threads} threads, {self.files} open files"


def tiny(folder: Path) -> Path:
    """A packed tiny model with a context of 512."""
    from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint

    write_checkpoint(folder / "checkpoint", {**QWEN2_MOE, "max_position_embeddings": 512})
    pack(folder / "checkpoint", folder / "tiny.estream", experts="int8", panel=32)
    return folder / "tiny.estream"


def soak(package: Path, prefills: int, seed: int) -> tuple[Held, Held]:
    """Runs the prefills; what was held after the warm-up and at the end."""
    draw = random.Random(seed)
    warm: Held | None = None
    with Engine(package, threads=1) as engine:
        vocab, longest = engine.package.architecture.vocab, min(engine.max_tokens, 512)
        # Handles of tensors are kept by shape: with as many lengths as prefills the cache would still grow at the end.
        lengths = [longest, *(draw.randint(1, longest) for _ in range(24))]
        for number in range(prefills):
            if number == prefills // 2:
                warm = Held.now()
            ids = [draw.randrange(vocab) for _ in range(longest if number == 0 else draw.choice(lengths))]
            failure = ("id", "interrupt")[number // 10 % 2] if number % 10 == 9 else None
            try:
                if failure == "id":
                    engine.prefill([*ids[:-1], vocab])
                elif failure == "interrupt":
                    engine.prefill(ids, logits="all", logits_sink=_interrupt)
                else:
                    engine.prefill(ids, logits=draw.choice(("last", "all", None)))
            except (EStreamError, KeyboardInterrupt):
                if failure is None:
                    raise
            else:
                if failure is not None:
                    raise SystemExit(f"prefill {number} was meant to fail")
        assert warm is not None
        return warm, Held.now()


def _interrupt(row: int, column: int, block: object) -> None:
    raise KeyboardInterrupt


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", nargs="?", type=Path)
    parser.add_argument("--prefills", type=int, default=1000, help="at least 8 (default 1000)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    if args.prefills < 8:
        parser.error("--prefills must be at least 8")
    with tempfile.TemporaryDirectory() as folder:
        package = args.package or tiny(Path(folder))
        with Engine(package, threads=1) as engine:  # the run time itself keeps files open once it was loaded
            engine.prefill([0])
        before = Held.now()
        warm, end = soak(package, args.prefills, args.seed)
        after = Held.now()
    print(f"before opening:      {before}")
    print(f"after the warm-up:   {warm}")
    print(f"after {args.prefills:>5} prefills: {end}")
    print(f"after closing:       {after}")
    grown = [
        name
        for name, more in (
            ("memory", end.memory - warm.memory > SLACK_BYTES),
            ("threads", end.threads > warm.threads or after.threads > before.threads),
            ("open files", end.files > warm.files or after.files > before.files),
        )
        if more
    ]
    print(f"grown: {', '.join(grown)}" if grown else "nothing grew")
    return 1 if grown else 0


if __name__ == "__main__":
    raise SystemExit(main())
