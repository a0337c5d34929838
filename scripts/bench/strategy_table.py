"""Tables of docs/comparison.md from lines that bench_strategies measured, and from simulations."""

from __future__ import annotations

import json
import statistics
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from estream.units import format_bytes, format_seconds

NOT_MEASURED = "not measured"
_COLUMNS = (
    "strategy",
    "tokens",
    "TTFT",
    "least to most",
    "/ estream",
    "bubble",
    "rows computed / useful",
    "tokens dropped",
    "peak memory",
    "perplexity",
)

Line = dict[str, Any]


def markdown(lines: list[Line], simulations: list[Line]) -> str:
    """One table per package, read limit and set of options that all strategies share; then one per simulated device."""
    tables = []
    perplexities = {
        (line["package"], line["model"], line["strategy"]): line for line in lines if _is(line, "perplexity")
    }
    prefills = [line for line in lines if _is(line, "prefill")]
    for package, model, limit in _distinct(prefills, "package", "model", "read_limit"):
        own = [
            line for line in prefills if (line["package"], line["model"], line["read_limit"]) == (package, model, limit)
        ]
        budget = _budget(line["options"]["memory"] for line in own)
        prompt = own[0]["text"] or "random tokens"
        rounds = 1 + max(line["round"] for line in own)
        rows = []
        for tokens, strategy in _distinct(own, "tokens", "strategy"):
            cell = [line for line in own if (line["tokens"], line["strategy"]) == (tokens, strategy)]
            beside = {line["round"]: line for line in own if (line["tokens"], line["strategy"]) == (tokens, "estream")}
            rows.append(_measured(strategy, tokens, cell, beside, perplexities.get((package, model, strategy))))
        what = f"{package}, target {own[0]['options']['backend']}, measured; {budget}; reads {_limited(limit)}; "
        notes = [
            f"{line['strategy']}, {word}: {line[word]}"
            for line in own
            for word in ("refused", "failed")
            if word in line
        ]
        tables.append(_table(f"{what}prompts: {prompt}; up to {rounds} rounds, fresh processes", rows, notes))
    for device, package in _distinct(simulations, "device", "package"):
        own = [one for one in simulations if (one["device"], one["package"]) == (device, package)]
        budget = _budget(one["memory"] for one in own)
        tables.append(
            _table(f"{package}, target htp, simulated: {device}; {budget}", [_simulated(one, own) for one in own])
        )
    return "\n\n".join(tables)


def simulated(path: Path) -> list[Line]:
    """What `estream simulate --json` printed, once or several times. Raises SystemExit for anything else: figures that
    do not say that they are simulated are not shown."""
    text, at, found, decoder = path.read_text(encoding="utf-8").strip(), 0, [], json.JSONDecoder()
    while at < len(text):
        value, end = decoder.raw_decode(text, at)
        found += value if isinstance(value, list) else [value]
        at = end + len(text[end:]) - len(text[end:].lstrip())
    for one in found:
        if one.get("simulated") is not True:
            raise SystemExit(f'{path}: not of estream simulate: no "simulated": true')
    return [{**one, "device": one["machine"]["name"], "strategy": one["machine"]["strategy"]} for one in found]


def _is(line: Line, kind: str) -> bool:
    return bool(line["kind"] == kind)


def _distinct(lines: Iterable[Line], *names: str) -> list[tuple[Any, ...]]:
    return list(dict.fromkeys(tuple(line[name] for name in names) for line in lines))


def _budget(given: Iterable[int | None]) -> str:
    memory = next((nbytes for nbytes in given if nbytes is not None), None)
    return "no budget" if memory is None else f"{format_bytes(memory)} each, but for those with another budget"


def _limited(limit: str | None) -> str:
    return "unlimited" if limit is None else f"limited to {limit}/s"


def _measured(strategy: str, tokens: int, cell: list[Line], beside: dict[int, Line], quality: Line | None) -> list[str]:
    """beside: estream's lines at these tokens, by round. What follows each other in a round has the machine's speed in
    common, which changes by half for minutes: its ratios say more than a ratio of medians."""
    runs = [line["stats"] for line in cell if "stats" in line]
    if not runs:
        return [strategy, str(tokens), "refused" if "refused" in cell[-1] else "failed", *[NOT_MEASURED] * 7]
    times = [run["ttft_s"] for run in runs]
    ratios = [
        line["stats"]["ttft_s"] / beside[line["round"]]["stats"]["ttft_s"]
        for line in cell
        if "stats" in line and "stats" in beside.get(line["round"], {})
    ]
    computed, useful = _all(runs, "rows_computed"), _all(runs, "rows_useful")
    dropped, bubbles = _all(runs, "dropped_rate"), _all(runs, "bubble_rate")
    peaks = [run["memory"]["peak_bytes"] for run in runs]
    return [
        strategy,
        str(tokens),
        format_seconds(statistics.median(times)),
        f"{format_seconds(min(times))} to {format_seconds(max(times))} ({len(times)})",
        f"{statistics.median(ratios):.3f}" if ratios else NOT_MEASURED,
        NOT_MEASURED if bubbles is None else f"{statistics.median(bubbles):.3f}",
        NOT_MEASURED if computed is None or not useful or not useful[0] else f"{computed[0] / useful[0]:.3f}",
        NOT_MEASURED if dropped is None else f"{max(dropped):.2%}",
        NOT_MEASURED if None in peaks else format_bytes(max(peaks)),
        _perplexity(quality),
    ]


def _perplexity(line: Line | None) -> str:
    if line is None or "quality" not in line:
        return NOT_MEASURED
    return f"{line['quality']['perplexity']:.3f} ({line['quality']['predicted']} tokens)"


def _simulated(one: Line, every: list[Line]) -> list[str]:
    beside = next((line for line in every if (line["tokens"], line["strategy"]) == (one["tokens"], "estream")), None)
    bubble, peak = one.get("bubble_rate"), one.get("peak_bytes")
    return [
        one["strategy"],
        str(one["tokens"]),
        format_seconds(one["ttft_s"]),
        "simulated",
        NOT_MEASURED if beside is None else f"{one['ttft_s'] / beside['ttft_s']:.3f}",
        NOT_MEASURED if bubble is None else f"{bubble:.3f}",
        NOT_MEASURED,
        NOT_MEASURED,
        NOT_MEASURED if peak is None else format_bytes(peak),
        NOT_MEASURED,
    ]


def _all(runs: list[Line], name: str) -> list[Any] | None:
    """The figure of every run; None where one has none."""
    values = [run.get(name) for run in runs]
    return None if None in values else values


def _table(title: str, rows: list[list[str]], notes: Iterable[str] = ()) -> str:
    lines = [title, "", _row(_COLUMNS), _row(["---"] * len(_COLUMNS)), *map(_row, rows)]
    different = list(dict.fromkeys(notes))
    return "\n".join([*lines, "", *different] if different else lines)


def _row(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"
