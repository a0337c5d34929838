"""`estream compile`: a packed model's graphs become contexts for phones."""

from __future__ import annotations

import argparse
import time
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estream.cli.console import Console
from estream.cli.options import add_json
from estream.units import format_bytes, format_seconds

if TYPE_CHECKING:
    from estream.package.contexts import ContextManifest

NAME = "compile"
HELP = "compile a packed model's graphs for phones"
DESCRIPTION = (
    "Compiles the NPU graphs of a packed model for one or several SoCs, runs each once in the simulator\n"
    "against numpy, "
    "and writes the contexts beside the model, under graphs/htp/SOC. Needs x86-64."
)
EXAMPLE = "  estream compile olmoe.estream --soc sm8650,sm8850"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package and the SoCs."""
    parser.add_argument("package", metavar="PACKAGE", type=Path, help="a packed model (NAME.estream)")
    parser.add_argument("--soc", metavar="SOC[,SOC]", required=True, help="phones: sm8550, sm8650, sm8750, sm8850")
    parser.add_argument(
        "--rows", metavar="N", type=int, help="token rows of a dense graph's call; 32 suits short prompts best"
    )
    parser.add_argument("--steps", metavar="N", type=int, help="blocks of keys per call of the attention graph")
    parser.add_argument(
        "--ladder", metavar="SxT[,SxT]", help="expert graphs: S tiles of T rows each, for instance 16x32,4x128,2x256"
    )
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Compiles for each SoC, and prints the compiler's figures. Every SoC is known before any work."""
    from estream.package.contexts import FOLDER
    from estream.package.reader import Package
    from estream.runtime.soc import find_soc
    from qnn_graphs.htp.contexts import compile_contexts

    chosen = sizes(args.rows, args.steps, args.ladder)
    socs = [find_soc(name.strip()) for name in dict.fromkeys(args.soc.split(","))]
    package = Package.open(args.package)
    report: dict[str, Any] = {}
    for soc in socs:
        started = time.monotonic()
        manifest = compile_contexts(package, soc, package.path / FOLDER / soc.name, chosen=chosen, say=console.more)
        report[soc.name] = figures(manifest)
        told = f"{len(manifest.graphs)} contexts, {format_bytes(report[soc.name]['context_bytes'])}"
        console.detail(_table(report[soc.name]["graphs"]))
        console.result(f"{args.package}: {soc.name}: {told} in {format_seconds(time.monotonic() - started)}")
    console.result_json({"package": args.package, "socs": report})
    return 0


def sizes(rows: int | None, steps: int | None, ladder: str | None) -> dict[str, Any]:
    """Sizes of graphs that the user chose, as fields of HtpPlan. Raises UsageError for what no graph can have."""
    from estream.errors import UsageError

    chosen: dict[str, Any] = {}
    if rows is not None:
        if rows % 32 or not 32 <= rows <= 512:
            raise UsageError("--rows must be a multiple of 32 up to 512", asked=rows)
        chosen["rows"] = rows
    if steps is not None:
        if not 1 <= steps <= 16:
            raise UsageError("--steps must be from 1 to 16", asked=steps)
        chosen["steps"] = steps
    if ladder is not None:
        try:
            rungs = sorted(
                (tuple(int(number) for number in rung.split("x")) for rung in ladder.split(",")), key=lambda r: r[1]
            )
            slots, tiles = zip(*rungs, strict=True)
        except (ValueError, IndexError):
            raise UsageError(
                "--ladder is not a list of SxT", asked=ladder, next_step="For example 16x32,4x128"
            ) from None
        multiples = all(large % small == 0 and large > small for small, large in pairwise(tiles))
        if min(slots) < 1 or max(slots) > 64 or tiles[0] < 1 or tiles[0] % 32 or tiles[-1] > 512 or not multiples:
            raise UsageError(
                "--ladder: tiles of 32 to 512 rows, each a multiple of the one before and of 32, at most 64 of them",
                asked=ladder,
            )
        chosen["ladder"] = rungs
    return chosen


def figures(manifest: ContextManifest) -> dict[str, Any]:
    """What the compiler says of one SoC's graphs. Bytes of a graph: of its context; traffic is that of one run."""
    graphs = []
    for name, entry in manifest.graphs.items():
        said = entry.report
        graphs.append(
            {
                "name": name,
                "bytes": entry.files[f"{name}_qnn.bin"].nbytes,
                **{
                    key: said[key]
                    for key in ("seconds", "read_bytes", "write_bytes", "spill_bytes", "spill_fill_bytes")
                },
                "operations": {kind: said[kind] for kind in ("scalar", "vector", "matrix")},
            }
        )
    return {
        "arch": manifest.arch,
        "qairt": manifest.qairt,
        "graphs": graphs,
        "context_bytes": sum(graph["bytes"] for graph in graphs),
    }


def _table(graphs: list[dict[str, Any]]) -> str:
    lines = [f"{'graph':<14}{'context':>10}{'compiled':>10}{'read':>12}{'written':>12}{'spilled':>10}  operations"]
    for graph in graphs:
        operations = "/".join(str(count) for count in graph["operations"].values())
        lines.append(
            f"{graph['name']:<14}{format_bytes(graph['bytes']):>10}{format_seconds(graph['seconds']):>10}"
            f"{format_bytes(graph['read_bytes']):>12}{format_bytes(graph['write_bytes']):>12}"
            f"{format_bytes(graph['spill_bytes']):>10}  {operations}"
        )
    return "\n".join(lines)
