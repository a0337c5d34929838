"""The strategies side by side: time, bubble, rows, dropped tokens, memory, quality. Prints rows for docs/comparison.md.

    python -m scripts.bench_strategies .demo/int8.estream olmoe.estream --tokens 256,1024,4096 --memory 1GiB \
        --strategies estream,on-demand,layer-streaming,padded,resident --read-limit 800MB --out strategies.jsonl

Every measurement is a fresh process (estream/cli/bench_child.py), so that its peak of memory is its own, and the second
prefill there; --first N makes the first one, which does not count, as short as N tokens. Within a round the strategies
follow each other, and each round begins with another one. All have the same --memory, but `resident`, which has none.
Packages with a tokenizer get the tokens of --text as prompts, over and over, and their perplexity is measured in
windows of --window tokens; those without get random tokens and no perplexity: their weights are random.
--with STRATEGY:NAME=VALUE gives a strategy an option of Engine (JSON, or else text); --only STRATEGY:ROUNDS gives it
fewer rounds than --rounds.

Results are lines of JSON: an interrupted run goes on where it stopped, failures are tried again. What `estream simulate
--json` printed, once or several times, joins by --simulated F.json. A read limit needs root.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import json
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np

from estream.checkpoint.tokenizer import Tokenizer
from estream.cli.bench_child import Job, run_apart
from estream.package.reader import Package
from estream.units import format_bytes, parse_size
from scripts.bench.cgroups import Cgroup
from scripts.bench.strategy_table import markdown, simulated

STRATEGIES = "estream,on-demand,layer-streaming,padded,resident"
TEXT = Path(__file__).resolve().parent / "derive" / "evaluation.txt"
UNLIMITED = {"resident": {"memory": None}}  # what all experts in memory costs is what the others save

Line = dict[str, Any]


def main() -> None:
    args = _parser().parse_args()
    given, only = _given(args.options), _only(args.only)
    results = Results(args.out)
    rate = None if args.read_limit is None else parse_size(args.read_limit)
    wanted = jobs(args, given, only)
    with contextlib.ExitStack() as stack:
        enter = None
        if rate is not None:
            enter = stack.enter_context(Cgroup("estream-strategies", read_rate=rate, path=args.packages[0])).enter
        for number, (key, job) in enumerate(wanted.items()):
            if key in results.done:
                continue
            began = time.monotonic()
            found = run_apart(job, enter)
            found["took_s"] = time.monotonic() - began
            results.add({**key_fields(key), "at": time.strftime("%Y-%m-%dT%H:%M:%S"), **found})
            print(f"  {number + 1} of {len(wanted)}: {_named(key)}: {_said(found)}", file=sys.stderr, flush=True)
    by_key = {key_of(line): line for line in results.lines}
    lines = [by_key[key] for key in wanted]
    print(markdown(lines, [line for path in args.simulated for line in simulated(path)]))


def jobs(args: argparse.Namespace, given: dict[str, dict[str, Any]], only: dict[str, int]) -> dict[str, Job]:
    """Everything to be measured by what it is known by, in the order of measuring."""
    strategies = args.strategies.split(",")
    found: dict[str, Job] = {}
    for path in args.packages:
        package = Measured(args, path)
        for tokens in map(int, args.tokens.split(",")):
            for turn in range(args.rounds):
                first = turn % len(strategies)
                for strategy in strategies[first:] + strategies[:first]:
                    if turn < only.get(strategy, args.rounds):
                        key, job = package.job(given, "prefill", strategy, tokens, turn)
                        found[key] = job
        if package.tokenized:
            for strategy in strategies:
                key, job = package.job(given, "perplexity", strategy, args.window, 0)
                found[key] = job
    return found


class Measured:
    """A package and what it is measured with."""

    def __init__(self, args: argparse.Namespace, path: Path) -> None:
        self._args, self._path = args, path
        self._model = hashlib.sha256((path / "model.json").read_bytes()).hexdigest()[:12]
        self.tokenized = (path / "tokenizer.json").is_file()
        if self.tokenized:
            self._text = Tokenizer.open(path).encode(args.text.read_text(encoding="utf-8"))
        else:
            self._vocab = Package.open(path).architecture.vocab

    def job(
        self, given: dict[str, dict[str, Any]], kind: str, strategy: str, tokens: int, turn: int
    ) -> tuple[str, Job]:
        """One measurement. A package that was packed again, or options that changed, make it another one."""
        args, prefill = self._args, kind == "prefill"
        common = {"backend": args.backend, "memory": parse_size(args.memory), "pinned": 0, "threads": args.threads}
        options = {**common, **UNLIMITED.get(strategy, {}), **given.get(strategy, {}), "strategy": strategy}
        job = Job(
            package=str(self._path.resolve()),
            ids=self._prompt(tokens) if prefill else self._text,
            options=options,
            window=None if prefill else tokens,
            first=args.first if prefill else None,
        )
        key = {
            "kind": kind,
            "package": self._path.name,
            "model": self._model,
            "strategy": strategy,
            "tokens": tokens,
            "round": turn,
            "text": args.text.name if self.tokenized else None,
            "read_limit": args.read_limit if prefill else None,
            "first": job.first,
            "options": options,
        }
        return key_of(key), job

    def _prompt(self, tokens: int) -> list[int]:
        if not self.tokenized:
            ids: list[int] = np.random.default_rng(0).integers(0, self._vocab, tokens).tolist()
            return ids
        return [self._text[at % len(self._text)] for at in range(tokens)]


KEY = ("kind", "package", "model", "strategy", "tokens", "round", "text", "read_limit", "first", "options")


def key_of(line: Line) -> str:
    """What a line was measured with, as one text."""
    return json.dumps([line[name] for name in KEY], sort_keys=True)


def key_fields(key: str) -> Line:
    return dict(zip(KEY, json.loads(key), strict=True))


class Results:
    """Lines of JSON, kept from run to run. done: keys that need no measuring."""

    def __init__(self, path: Path) -> None:
        self._path = path
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        whole, _, broken = text.rpartition("\n")  # a run that was killed may have left half a line
        if broken:
            path.write_text(whole + "\n" if whole else "", encoding="utf-8")
        every = {
            key_of(line): line for line in map(json.loads, filter(None, whole.splitlines()))
        }  # the last one counts
        self.lines = list(every.values())
        self.done = {key for key, line in every.items() if "failed" not in line}

    def add(self, line: Line) -> None:
        """Written at once."""
        with self._path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(line) + "\n")
        key = key_of(line)
        self.lines = [kept for kept in self.lines if key_of(kept) != key] + [line]


def _named(key: str) -> str:
    line = key_fields(key)
    return f"{line['package']}, {line['strategy']}, {line['kind']}, {line['tokens']} tokens, round {line['round'] + 1}"


def _said(found: Line) -> str:
    if "stats" in found:
        return f"{found['stats']['ttft_s']:.3f} s, {format_bytes(found['stats']['memory']['peak_bytes'])}"
    if "quality" in found:
        return f"perplexity {found['quality']['perplexity']:.4f}"
    return f"refused: {found['refused']}" if "refused" in found else f"failed: {found['failed']}"


def _given(texts: list[str]) -> dict[str, dict[str, Any]]:
    """['npumoe:load=1'] → {'npumoe': {'load': 1}}."""
    given: dict[str, dict[str, Any]] = {}
    for text in texts:
        strategy, colon, option = text.partition(":")
        name, equals, value = option.partition("=")
        if not (colon and equals and name):
            raise SystemExit(f"--with {text}: give STRATEGY:NAME=VALUE")
        try:
            given.setdefault(strategy, {})[name] = json.loads(value)
        except json.JSONDecodeError:
            given[strategy][name] = value
    return given


def _only(texts: list[str]) -> dict[str, int]:
    """['padded:1'] → {'padded': 1}."""
    only = {}
    for text in texts:
        strategy, colon, rounds = text.partition(":")
        if not (colon and strategy and rounds.isdecimal()):
            raise SystemExit(f"--only {text}: give STRATEGY:ROUNDS")
        only[strategy] = int(rounds)
    return only


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", metavar="PACKAGE", type=Path, nargs="+")
    parser.add_argument("--strategies", default=STRATEGIES, help=f"comma separated (default {STRATEGIES})")
    parser.add_argument("--tokens", default="256,1024,4096", help="prompt lengths, comma separated")
    parser.add_argument("--memory", default="1GiB", help="budget of each process (default 1GiB)")
    parser.add_argument("--read-limit", metavar="RATE", help="bytes per second from the disk of the first package")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--only", metavar="STRATEGY:ROUNDS", action="append", default=[], help="0: not at all")
    parser.add_argument("--first", metavar="N", type=int, help="tokens of the first prefill (default: the prompt)")
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu", help="htp is not timed: use --simulated")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--text", type=Path, default=TEXT, help="UTF-8 (default scripts/derive/evaluation.txt)")
    parser.add_argument("--window", type=int, default=256, help="tokens of a window of perplexity (default 256)")
    parser.add_argument("--with", dest="options", metavar="STRATEGY:NAME=VALUE", action="append", default=[])
    parser.add_argument("--simulated", metavar="F.json", type=Path, action="append", default=[])
    parser.add_argument("--out", type=Path, required=True, help="lines of JSON; what is there is not measured again")
    return parser


if __name__ == "__main__":
    main()
