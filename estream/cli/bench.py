"""`estream bench`: strategies side by side, each prefill in a process of its own."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from estream.cli import npumoe
from estream.cli.bench_child import Job, run_apart
from estream.cli.console import Console
from estream.cli.options import add_json, add_soc, folder, positive, size, whole
from estream.cli.progress import Progress
from estream.cli.report import simulated
from estream.errors import UsageError
from estream.strategies import STRATEGIES, Strategy, parse_strategies
from estream.units import format_bytes, format_seconds

NAME = "bench"
HELP = "measure strategies side by side"
DESCRIPTION = (
    "Prefills random prompts with each strategy in turn, each time in a process of its own, and prints medians of the\n"
    "second of two prefills there, with the least and the largest time. All strategies get the same prompts and the\n"
    f"same budget. What a strategy refuses is said in its row.\n\nstrategies: {', '.join(STRATEGIES)}"
)
EXAMPLE = "  estream bench olmoe.estream --strategy estream,layer-streaming,on-demand --tokens 256,1024 --memory 1.5GiB"
_USUAL = "estream,layer-streaming,on-demand,resident"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, what is compared, and how often."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    parser.add_argument(
        "--strategy", metavar="A,B", type=_strategies, default=_USUAL, help=f"what to compare (default {_USUAL})"
    )
    parser.add_argument("--tokens", metavar="N,N", type=_lengths, required=True, help="lengths of the prompts")
    parser.add_argument("--rounds", metavar="N", type=positive, default=3, help="measurements of each (default 3)")
    parser.add_argument("--memory", metavar="SIZE", type=size, help="budget of the whole process, for every strategy")
    parser.add_argument(
        "--backend",
        choices=("cpu", "htp"),
        default="cpu",
        help="where the graphs of strategies run that leave it open (default cpu)",
    )
    add_soc(parser)
    parser.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: the target's choice)")
    parser.add_argument("--seed", metavar="N", type=whole, default=0, help="of the prompts' random ids (default 0)")
    npumoe.add_arguments(parser)
    add_json(parser)


def _strategies(text: str) -> list[Strategy]:
    try:
        return parse_strategies(text)
    except UsageError as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _lengths(text: str) -> list[int]:
    lengths = [positive(piece) for piece in text.split(",")]
    if len(set(lengths)) < len(lengths):
        raise argparse.ArgumentTypeError(f"a length stands twice in {text!r}")
    return lengths


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures round by round and prints a table. Status 1 where no strategy ran, 2 where all were called wrongly."""
    import tempfile

    from estream.package.reader import Package
    from estream.prompt import longest_prompt
    from estream.strategies.loads import ExpertLoads
    from estream.strategies.npumoe_options import NpuMoeOptions

    own = npumoe.chosen(args, [strategy.name for strategy in args.strategy])
    package = Package.open(args.package)
    for tokens in args.tokens:
        longest_prompt(tokens, package.architecture.context, "--tokens")
    if own is not None:
        ExpertLoads.read(NpuMoeOptions.of(own).calibration, package)
    cells = [Cell(strategy, tokens) for tokens in args.tokens for strategy in args.strategy]
    with Progress(console) as progress, tempfile.TemporaryDirectory(prefix="estream-bench-") as scratch:
        done, total = 0, args.rounds * len(cells)
        for number in range(args.rounds):
            # No strategy is always first, or always after the same other one.
            turn = number % len(args.strategy)
            for cell in sorted(
                cells, key=lambda cell: (cell.tokens, (args.strategy.index(cell.strategy) - turn) % len(args.strategy))
            ):
                progress("bench", done, total)
                done += 1
                if cell.failure is None:
                    file = Path(scratch, f"{cell.strategy.name}-{cell.tokens}.npy")
                    cell.add(run_apart(_job(args, own, cell, package.architecture.vocab, file)), file)
        progress("bench", total, total)
    for cell in cells:
        cell.compare(next((one for one in cells if one.tokens == cell.tokens and one.runs), None))
    console.result(report(cells))
    console.result_json(
        {
            "package": args.package,
            "backend": args.backend,
            "memory": args.memory,
            "rounds": args.rounds,
            "seed": args.seed,
            "cells": [cell.to_dict() for cell in cells],
        }
    )
    if any(cell.runs for cell in cells):
        return 0
    return 2 if all(cell.usage for cell in cells) else 1


def _job(args: argparse.Namespace, own: dict[str, Any] | None, cell: Cell, vocab: int, logits: Path) -> Job:
    """own: options of npumoe."""
    import numpy as np

    backend = str(cell.strategy.options.get("backend", args.backend))
    return Job(
        package=str(args.package),
        ids=np.random.default_rng(args.seed).integers(0, vocab, cell.tokens).tolist(),
        options={
            "backend": backend,
            "soc": args.soc if backend == "htp" else None,
            "memory": args.memory,
            "threads": args.threads,
            "pinned": 0,  # what one prefill pins, only a second one would find
            "strategy": cell.strategy.name,
            "npumoe": own if cell.strategy.name == "npumoe" else None,
        },
        logits=str(logits),
    )


class Cell:
    """A strategy at a length: its measurements, or why there are none. deviation: of its logits from those of the first
    strategy that ran, as a share of their range."""

    def __init__(self, strategy: Strategy, tokens: int) -> None:
        self.strategy, self.tokens = strategy, tokens
        self.runs: list[dict[str, Any]] = []
        self.failure: str | None = None
        self.refused = self.usage = False
        self.deviation: float | None = None
        self._logits: Any = None

    def add(self, answer: dict[str, Any], file: Path) -> None:
        """What `run_apart` gave. A failure ends the cell."""
        import numpy as np

        if "stats" not in answer:
            self.refused, self.usage = "refused" in answer, answer.get("usage", False)
            self.failure = answer["refused" if self.refused else "failed"]
            return
        self.runs.append(answer)
        self._logits = np.load(file)

    def compare(self, first: Cell | None) -> None:
        """Sets `deviation`."""
        if self.runs and first is not None:
            distance = abs(self._logits - first._logits).max()
            self.deviation = float(distance / (first._logits.max() - first._logits.min()))

    @property
    def times(self) -> list[float]:
        return [run["stats"]["ttft_s"] for run in self.runs]

    def median(self, key: str) -> float | None:
        """Of a statistic; None where it was not measured."""
        import statistics

        values = [run["stats"][key] for run in self.runs if run["stats"][key] is not None]
        return statistics.median(values) if values else None

    @property
    def peak_bytes(self) -> int | None:
        return max((run["stats"]["memory"]["peak_bytes"] or 0 for run in self.runs), default=None) or None

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        keys = ("ttft_s", "bubble_rate", "flash_wait_s", "bytes_read", "rows_computed", "rows_useful", "dropped_rate")
        return {
            "strategy": self.strategy.name,
            "exact": self.strategy.exact,
            "tokens": self.tokens,
            "ttft_s": self.times,
            "first_ttft_s": [run["first_ttft_s"] for run in self.runs],
            "median": {key: self.median(key) for key in keys},
            "peak_bytes": self.peak_bytes,
            "deviation": self.deviation,
            "configuration": self.runs[-1]["configuration"] if self.runs else None,
            "failure": self.failure,
        }


def report(cells: list[Cell]) -> str:
    """One line per cell; below their table failures, each once for a strategy, and which rows are simulated."""
    heads = ("tokens", "strategy", "TTFT", "least ... largest", "bubble", "read", "computed/useful", "dropped", "peak")
    rows: list[tuple[str, ...]] = [heads]
    failures: dict[tuple[str, str], list[str]] = {}
    for cell in cells:
        if not cell.runs:
            rows.append((str(cell.tokens), cell.strategy.name, "refused" if cell.refused else "failed", *[""] * 6))
        else:
            rows.append((str(cell.tokens), cell.strategy.name, *_figures(cell)))
        if cell.failure is not None:
            failures.setdefault((cell.strategy.name, cell.failure), []).append(str(cell.tokens))
    notes = [f"{name}, {', '.join(tokens)} tokens: {failure}" for (name, failure), tokens in failures.items()]
    on_htp = [cell for cell in cells if cell.runs and cell.runs[-1]["configuration"].get("simulated")]
    if on_htp:
        names = ", ".join(dict.fromkeys(cell.strategy.name for cell in on_htp))
        notes.append(simulated(on_htp[0].runs[-1]["configuration"]["soc"], f" ({names})"))
    widths = [max(len(row[column]) for row in rows) for column in range(len(heads))]
    lines = [
        "  ".join(
            word.ljust(width) if column == 1 else word.rjust(width)
            for column, (word, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
    return "\n".join(lines + notes)


def _figures(cell: Cell) -> tuple[str, ...]:
    ttft, bubble, read = cell.median("ttft_s"), cell.median("bubble_rate"), cell.median("bytes_read")
    computed, useful, dropped = cell.median("rows_computed"), cell.median("rows_useful"), cell.median("dropped_rate")
    return (
        "-" if ttft is None else format_seconds(ttft),
        f"{format_seconds(min(cell.times))} ... {format_seconds(max(cell.times))}",
        "-" if bubble is None else f"{100 * bubble:.1f} %",
        "-" if read is None else format_bytes(read),
        "-" if computed is None or not useful else f"{computed / useful:.2f}",
        "-" if dropped is None else f"{100 * dropped:.1f} %",
        "-" if cell.peak_bytes is None else format_bytes(cell.peak_bytes),
    )
