"""Which lowering of an expert is best on the HTP? Compiles the candidates and reads the compiler's report.

    python -m scripts.search_lowerings --cache FILE [--json FILE] [--markdown FILE] [--seconds N]
                                       [--models olmoe,…] [--schemes int8,…] [--socs sm8650,…]

For every model shape, scheme and SoC: panel widths Ip (equal splits of the expert), column chunks C and tile formats
are tried at 256 rows, the hardest rung; the two best go through the whole ladder; the best by the stated cost is kept.

Cost of a dispatch = max(DDR traffic / 60 GB/s, FLOPs / 8 TFLOPS) + 100 µs; of a candidate: the sum over one layer of a
1,000-token prompt with uniform routing, every dispatch full. A rung that spills counts as four times its traffic. The
constants are published figures for phones, not measurements: they rank, they do not predict.

Results are cached by graph bytes, SoC and compiler, one JSON line each: an interrupted search resumes where it stopped.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from estream.layers.htp.ladder import plan_layer
from estream.package.chunks import CHUNK_ELEMENTS
from qnn_graphs.htp.build import default_ladder
from qnn_graphs.htp.expert import ExpertGraph, build_expert
from scripts.lowering.cache import ReportCache

DDR_BYTES_PER_S, FLOPS, DISPATCH_S, SPILL_FACTOR = 60e9, 8e12, 100e-6, 4
TOKENS = 1000
FINALISTS = 2


@dataclass(frozen=True)
class Shape:
    hidden: int
    intermediate: int
    experts: int
    top_k: int


SHAPES = {
    "olmoe": Shape(2048, 1024, 64, 8),
    "qwen3-30b-a3b": Shape(2048, 768, 128, 8),
    "deepseek-v2-lite": Shape(2048, 1408, 64, 6),
    "mixtral": Shape(4096, 14336, 8, 2),
}


def candidates(shape: Shape, scheme: str) -> Iterator[ExpertGraph]:
    """Panels from the whole expert down to 256 channels, two chunk counts, both tile formats where there are two."""
    for panels in range(1, shape.intermediate // 256 + 1):
        width = -(-shape.intermediate // panels // 64) * 64
        if (
            width > 2048
            or (scheme == "int4" and shape.hidden * width > 1 << 22)
            or (panels > 1 and -(-shape.intermediate // width) != panels)
        ):
            continue
        if width * panels > 1.05 * shape.intermediate:
            continue
        fitting = [c for c in (1, 2, 4, 8, 16) if width % (32 * c) == 0 and shape.hidden * width // c <= CHUNK_ELEMENTS]
        for chunks in fitting[:2]:
            for tile in ("f16",) if scheme == "f16" else ("f16", "u16"):
                yield ExpertGraph(shape.hidden, width, scheme, 1, 1, chunks, tile)


def dispatch_seconds(spec: ExpertGraph, report: dict[str, Any]) -> float:
    traffic = report["read_bytes"] + report["write_bytes"]
    traffic *= SPILL_FACTOR if report["spill_bytes"] else 1
    flops = 6 * spec.hidden * spec.width * spec.slots * spec.rows
    return float(max(traffic / DDR_BYTES_PER_S, flops / FLOPS) + DISPATCH_S)


def layer(
    shape: Shape, specs: dict[int, ExpertGraph], reports: dict[int, dict[str, Any]], tokens: int
) -> dict[str, float]:
    """One layer with uniform routing, planned as the engine plans it: seconds by the cost, traffic in bytes, and that
    over what would be ideal: each panel's weights once and each tile in and out once."""
    rng = np.random.default_rng(0)
    chosen = np.argsort(rng.random((tokens, shape.experts)), axis=1)[:, : shape.top_k]
    loads = np.bincount(chosen.reshape(-1), minlength=shape.experts)
    ladder = [(spec.slots, rows) for rows, spec in sorted(specs.items(), reverse=True)]
    any_spec = next(iter(specs.values()))
    panels = -(-shape.intermediate // any_spec.width)
    seconds = traffic = computed = 0.0
    ideal = panels * any_spec.weight_bytes * np.count_nonzero(loads)
    for dispatch in plan_layer(loads.tolist(), panels, ladder):
        slots, rows = ladder[dispatch.rung]
        traffic += reports[rows]["read_bytes"] + reports[rows]["write_bytes"]
        seconds += dispatch_seconds(specs[rows], reports[rows])
        computed += slots * rows
        ideal += len(dispatch.tiles) * specs[rows].tile_bytes
    return {
        "seconds": seconds,
        "traffic": traffic,
        "ratio": traffic / ideal,
        "rows_ratio": computed / float(panels * loads.sum()),
    }


def search(cache: ReportCache, shape: Shape, scheme: str, soc: str) -> dict[str, Any] | None:
    """The best candidate with its rungs, or None if none compiles."""
    ladder, probed = default_ladder(shape.experts, shape.top_k, scheme), []
    for candidate in candidates(shape, scheme):
        slots, rows = ladder[-1]
        spec = replace(candidate, slots=slots, rows=rows)
        report = _report(cache, spec, soc)
        if "refused" not in report:
            panels = -(-shape.intermediate // spec.width)
            probed.append((panels * dispatch_seconds(spec, report), len(probed), candidate))
    best: dict[str, Any] | None = None
    for _, _, candidate in sorted(probed)[:FINALISTS]:
        specs = {rows: replace(candidate, slots=slots, rows=rows) for slots, rows in ladder}
        reports = {rows: _report(cache, spec, soc) for rows, spec in specs.items()}
        if any("refused" in report for report in reports.values()):
            continue
        result = layer(shape, specs, reports, TOKENS)
        if best is None or result["seconds"] < best["layer"]["seconds"]:
            at_4096 = layer(shape, specs, reports, 4096)
            rungs = {f"{specs[rows].slots}x{rows}": reports[rows] for rows in specs}
            best = {"candidate": asdict(candidate), "layer": result, "layer_4096": at_4096, "rungs": rungs}
    return best


def _report(cache: ReportCache, spec: ExpertGraph, soc: str) -> dict[str, Any]:
    return cache.report(build_expert(spec), soc, spec=asdict(spec))


def markdown(results: list[dict[str, Any]]) -> str:
    lines = [
        "| model | SoC | scheme | Ip, chunks, tiles | rung | scalar/vector/matrix | MB read / written / spilled "
        "| context KB | traffic ÷ ideal |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        c = result["candidate"]
        for name, r in result["rungs"].items():
            spec = ExpertGraph(**r["spec"])
            ratio = (r["read_bytes"] + r["write_bytes"]) / spec.ideal_bytes
            megabytes = " / ".join(f"{r[key] / 1e6:.1f}" for key in ("read_bytes", "write_bytes", "spill_bytes"))
            lines.append(
                f"| {result['model']} | {result['soc']} | {c['scheme']} | {c['width']}, {c['chunks']}, {c['tile']} "
                f"| {name} | {r['scalar']}/{r['vector']}/{r['matrix']} | {megabytes} "
                f"| {r['context_bytes'] // 1024} | {ratio:.3f} |"
            )
    lines += [
        "",
        "One layer with uniform routing. Ideal: each panel's weights once, each tile in and out once.",
        "",
        "| model | SoC | scheme | MB at 1,000 tokens | ÷ ideal | MB at 4,096 tokens | ÷ ideal |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for result in results:
        one, four = result["layer"], result["layer_4096"]
        lines.append(
            f"| {result['model']} | {result['soc']} | {result['candidate']['scheme']} | {one['traffic'] / 1e6:.0f} "
            f"| {one['ratio']:.2f} | {four['traffic'] / 1e6:.0f} | {four['ratio']:.2f} |"
        )
    return "\n".join(lines) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--markdown", type=Path)
    parser.add_argument("--models", default=",".join(SHAPES))
    parser.add_argument("--schemes", default="int8,f16,int4")
    parser.add_argument("--socs", default="sm8650,sm8850")
    parser.add_argument("--seconds", type=float, default=1800, help="stop after this long; run again to go on")
    options = parser.parse_args()
    cache, results = ReportCache(options.cache, time.monotonic() + options.seconds), []
    work = [
        (s, m, c)
        for s in options.schemes.split(",")
        for m in options.models.split(",")
        for c in options.socs.split(",")
    ]
    for scheme, model, soc in work:
        try:
            best = search(cache, SHAPES[model], scheme, soc)
        except TimeoutError:
            print(f"{model} {scheme} {soc}: not finished, run again to go on", flush=True)
            continue
        if best is None:
            print(f"{model} {scheme} {soc}: nothing compiles", flush=True)
            continue
        results.append({"model": model, "soc": soc} | best)
        c, one = best["candidate"], best["layer"]
        print(
            f"{model} {scheme} {soc}: Ip {c['width']}, chunks {c['chunks']}, {c['tile']} tiles, "
            f"traffic / ideal {one['ratio']:.2f}",
            flush=True,
        )
    if options.json:
        options.json.write_text(json.dumps(results, indent=1) + "\n")
    if options.markdown:
        options.markdown.write_text(markdown(results))


if __name__ == "__main__":
    main()
