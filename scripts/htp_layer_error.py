#!/usr/bin/env python3
"""One full-size OLMoE layer of experts in the NPU's simulator: how far from float64 of its own dequantised weights?

    scripts/htp_layer_error.py                      # 64 experts, top-8, 256 tokens, int8 and int4: half an hour
    scripts/htp_layer_error.py --tokens 64 --schemes int8

A one-layer package of the shape is made with random weights, prefilled on htp with the real ladder, and the sum of all
experts (routed by the layer's own router) compared with float64. Limit: norm of the difference over norm of the sum,
over all tokens, 5e-3. Exit status: 0 within the limit, 1 beyond it.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the checkout, installed or not

from estream import Engine
from estream.errors import EStreamError
from estream.layers.observe import Rows
from estream.package.chunks import chunk_names
from estream.package.layout import INT4_GROUP, PanelLayout
from estream.package.quantise import part_views
from estream.package.reader import Package
from estream.package.synth import synthesize
from estream.routing import RouteTable
from estream.streams import keep_stdout_ours

LIMIT = 5e-3


class Seen:
    """An observer that keeps what the experts were given, and the sum of what they gave, of layer 0."""

    def __init__(self, tokens: int, hidden: int) -> None:
        self.normed = self.logits = np.zeros(0)
        self.sum = np.zeros((tokens, hidden), np.float64)

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        if graph == "o_router":
            self.normed, self.logits = arrays["normed"].astype(np.float64), arrays["logits"].copy()
        elif graph == "expert":
            self.sum[rows] += arrays["y"]


def expected(package: Package, seen: Seen) -> np.ndarray:
    """The same sum in float64, straight from the bytes of the pool."""
    pool, arch = package.pool, package.architecture
    table = RouteTable.build(package.family.route(seen.logits.astype(np.float32)), arch.experts)
    total = np.zeros_like(seen.sum)
    bytes_ = np.memmap(package.experts_file, np.uint8, "r")
    for panel in range(pool.panels_per_layer):
        expert = panel // pool.panels_per_expert
        at = slice(int(table.offsets[expert]), int(table.offsets[expert + 1]))
        if at.start < at.stop:
            offset = pool.panel_offset(0, panel)
            weights = matrices(pool.panel, np.array(bytes_[offset : offset + pool.panel.panel_bytes]))
            x, rows = seen.normed[table.rows[at]], table.rows[at]
            g = x @ weights["gate"] * weights["gate_scale"]
            middle = g / (1 + np.exp(-g)) * (x @ weights["up"]) * weights["mid_scale"]
            total[rows] += (middle @ weights["down"]) * table.gates[at, None]
    return total


def matrices(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """gate, up, down and the magnitudes of a packed panel, float64."""
    views = part_views(layout, panel)
    found = {}
    for name in ("gate", "up", "down"):
        chunks = []
        for key, multiplier in zip(
            chunk_names(name, layout.chunks), chunk_names(f"{name}_multiplier", layout.chunks), strict=True
        ):
            chunk = views[key]
            if layout.scheme == "int4":
                nibbles = np.concatenate([chunk & 15, chunk >> 4]).astype(np.int64) - 8
                chunks.append(nibbles * np.repeat(views[multiplier].astype(np.int64), INT4_GROUP, axis=0) / 128)
            else:
                chunks.append((chunk.astype(np.float64) - 128) / 128 if layout.scheme == "int8" else chunk)
        found[name] = np.concatenate(chunks, axis=1).astype(np.float64)
    for name in ("gate_scale", "mid_scale"):
        found[name] = views[name].astype(np.float64) if name in views else np.ones(layout.width)
    return found


def measure(scheme: str, tokens: int, soc: str) -> dict[str, Any]:
    """Makes the package, runs it, compares."""
    with tempfile.TemporaryDirectory(prefix="estream-layer-") as folder:
        path = Path(folder, "layer.estream")
        synthesize("olmoe-1b-7b", path, experts=scheme, layers=1)
        started = time.perf_counter()
        with Engine(path, "htp", soc=soc, max_tokens=tokens) as engine:
            package = engine.package
            seen = Seen(tokens, package.architecture.hidden)
            ids = np.random.default_rng(0).integers(0, package.architecture.vocab, tokens)
            stats = engine.prefill(ids, logits=None, observe=seen).stats
            exact = expected(package, seen)
            return {
                "scheme": scheme,
                "soc": soc,
                "experts": package.architecture.experts,
                "tokens": tokens,
                "ladder": engine.configuration["ladder"],
                "rows_computed": stats.rows_computed,
                "rows_useful": stats.rows_useful,
                "error": float(np.linalg.norm(seen.sum - exact) / np.linalg.norm(exact)),
                "worst_token": float((np.linalg.norm(seen.sum - exact, axis=1) / np.linalg.norm(exact, axis=1)).max()),
                "seconds": time.perf_counter() - started,
            }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--schemes", default="int8,int4")
    parser.add_argument("--soc", default="sm8650")
    parser.add_argument("--json", action="store_true", help="print one JSON list on stdout")
    args = parser.parse_args()
    keep_stdout_ours()
    results = []
    try:
        for scheme in args.schemes.split(","):
            results.append(measure(scheme, args.tokens, args.soc))
            if not args.json:
                print("; ".join(f"{name} {value}" for name, value in results[-1].items()), flush=True)
    except EStreamError as error:
        print(f"htp_layer_error: {error}", file=sys.stderr)
        return error.exit_status
    if args.json:
        print(json.dumps(results))
    return int(any(result["error"] > LIMIT for result in results))


if __name__ == "__main__":
    sys.exit(main())
