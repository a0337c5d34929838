"""Fits four figures of the OnePlus 15's profile to four published times; says how far others are met.

    python -m scripts.fit_phone            # fitted and held-out errors, bubbles: a minute or two
    python -m scripts.fit_phone --write    # and the fitted figures into estream/solver/phones/oneplus15.json
    python -m scripts.fit_phone --check    # only the times, with the figures of the file: seconds

The published system (arXiv 2609.06551) stores 4.5 bits per weight: its packages are outlines with records of that size;
everything else (dispatches, pipeline, solver) is what `estream simulate` runs. Gauss-Newton on the logarithms of the
figures, from the same start every time.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cache, cached_property
from pathlib import Path
from typing import Any

import numpy as np

from estream.package.layout import PanelLayout, align
from estream.package.outline import outline
from estream.package.reader import Package
from estream.solver.load import draw_counts
from estream.solver.phone import Phone, load_phone
from estream.solver.search import Plan
from estream.solver.simulate import simulate_prefill
from estream.units import parse_size
from qnn_graphs.htp.build import default_plan

DEVICE = "oneplus15"
START = {"matrix_flops": 1.2e13, "vector_bytes_per_s": 2e10, "latent_flops": 1.2e13, "flash_bytes_per_s": 3e9}
FITTED = tuple(START)
_DIGITS = 4  # of a fitted figure
_BITS = 4.5  # per weight of the published system's records


@dataclass(frozen=True)
class Figure:
    """A published time. memory: the largest that is published of the model's runs, None where none is."""

    preset: str
    tokens: int
    seconds: float
    fitted: bool
    memory: str | None = None

    @property
    def name(self) -> str:
        return f"{self.preset}, {self.tokens} tokens"


FIGURES = (
    Figure("lfm2.5-8b-a1b", 4096, 2.14, True),
    Figure("deepseek-v2-lite", 4096, 9.53, True),
    Figure("qwen3-30b-a3b", 1024, 1024 / 212, True, "1.87GiB"),
    Figure("qwen3-30b-a3b", 4096, 4096 / 599, True, "1.87GiB"),
    Figure("olmoe-1b-7b", 4096, 2.12, False),
    Figure("mixtral-8x7b", 1024, 1024 / 144.5, False, "4.11GiB"),
    Figure("mixtral-8x7b", 4096, 4096 / 301.5, False, "4.11GiB"),
    Figure("qwen3-30b-a3b", 2048, 2048 / 406, False, "1.87GiB"),
)
BUBBLES = {"on-demand": 0.3441, "after-routing": 0.2136, "before-routing": 0.0905}  # OLMoE, 1024 tokens


@dataclass(frozen=True)
class PublishedPanel(PanelLayout):
    """A panel of the published system: the same matrices, 4.5 bits per weight."""

    @cached_property
    def panel_bytes(self) -> int:
        return align(int(3 * self.hidden * self.width * _BITS / 8))


@cache
def published(preset: str) -> Package:
    """The outline of a preset with the published system's records."""
    package = outline(preset, experts="int4")
    panel = package.pool.panel
    package.pool = replace(package.pool, panel=PublishedPanel(panel.hidden, panel.width, panel.scheme, panel.biased))
    return package


@cache
def counts_of(preset: str, tokens: int) -> list[np.ndarray]:
    package = published(preset)
    arch = package.architecture
    return draw_counts(arch.experts, arch.top_k, tokens, len(package.pool.moe_layers))


def run(phone: Phone, package: Package, tokens: int, **options: Any) -> Plan:
    """What `estream simulate` says, uniform routing."""
    counts = counts_of(package.path.name, tokens)
    return simulate_prefill(package, phone, tokens, counts, ladder_of(package.path.name), **options)


@cache
def ladder_of(preset: str) -> tuple[tuple[int, int], ...]:
    schemes = published(preset).manifest
    ladder = default_plan(published(preset).architecture, experts=schemes.experts, dense=schemes.dense).ladder
    return tuple(sorted(ladder, key=lambda rung: -rung[1]))


def simulated(phone: Phone, figure: Figure) -> float:
    """Seconds."""
    memory = None if figure.memory is None else parse_size(figure.memory)
    return run(phone, published(figure.preset), figure.tokens, memory=memory).prediction.ttft_s


def fit(phone: Phone, figures: Sequence[Figure], rounds: int = 12) -> Phone:
    """The phone whose FITTED figures meet the published times best: least squares of the logarithms of their ratios."""

    def phone_at(logs: np.ndarray) -> Phone:
        return replace(phone, **{name: float(value) for name, value in zip(FITTED, np.exp(logs), strict=True)})

    def misses(logs: np.ndarray) -> np.ndarray:
        at = phone_at(logs)
        return np.log([simulated(at, figure) / figure.seconds for figure in figures])

    logs, step = np.log(list(START.values())), 0.02
    best = misses(logs)
    for _ in range(rounds):
        slopes = np.stack([(misses(logs + step * unit) - best) / step for unit in np.eye(len(logs))], axis=1)
        change = np.clip(np.linalg.lstsq(slopes, -best, rcond=1e-3)[0], -0.7, 0.7)
        tried = [(logs + share * change, misses(logs + share * change)) for share in (1.0, 0.5, 0.25)]
        new, missed = min(tried, key=lambda pair: float((pair[1] ** 2).sum()))
        if (missed**2).sum() >= (best**2).sum() - 1e-9:
            break
        logs, best = new, missed
    return phone_at(logs)


def rounded(value: float) -> float:
    return float(f"{value:.{_DIGITS - 1}e}")


def times_table(phone: Phone) -> list[str]:
    lines = ["| figure | | published | simulated | error |", "| --- | --- | --- | --- | --- |"]
    for figure in FIGURES:
        seconds = simulated(phone, figure)
        kind = "fitted" if figure.fitted else "held out"
        error = f"{100 * (seconds / figure.seconds - 1):+.1f} %"
        lines.append(f"| {figure.name} | {kind} | {figure.seconds:.2f} s | {seconds:.2f} s | {error} |")
    return lines


def bubbles(phone: Phone) -> dict[str, float]:
    """Bubble rate of OLMoE at 1024 tokens by prefetch mode."""
    package = published("olmoe-1b-7b")
    return {mode: run(phone, package, 1024, prefetch=mode).prediction.bubble_rate for mode in BUBBLES}


def bubbles_table(phone: Phone) -> list[str]:
    lines = ["| OLMoE, 1024 tokens | published bubble | simulated |", "| --- | --- | --- |"]
    return lines + [
        f"| {mode} | {100 * BUBBLES[mode]:.1f} % | {100 * rate:.1f} % |" for mode, rate in bubbles(phone).items()
    ]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="do not fit: the figures are those of the file")
    parser.add_argument("--write", action="store_true", help="write the fitted figures into the file")
    args = parser.parse_args()
    phone = load_phone(DEVICE)
    if not args.check:
        found = fit(phone, [figure for figure in FIGURES if figure.fitted])
        phone = replace(found, **{name: rounded(getattr(found, name)) for name in FITTED})
    print("\n".join(f"{name}: {getattr(phone, name):.4g}" for name in FITTED), end="\n\n")
    print("\n".join(times_table(phone)), end="\n\n")
    print("\n".join(bubbles_table(phone)))
    if args.write:
        path = Path(__file__).parents[1] / "estream" / "solver" / "phones" / f"{DEVICE}.json"
        raw = json.loads(path.read_text())
        for name in FITTED:
            raw["figures"][name]["value"] = getattr(phone, name)
        path.write_text(json.dumps(raw, indent=1) + "\n")


if __name__ == "__main__":
    main()
