"""`estream compile`: a packed model's graphs become contexts for phones."""

from __future__ import annotations

import argparse
import time
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
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Compiles for each SoC, and prints the compiler's figures. Every SoC is known before any work."""
    from estream.package.contexts import FOLDER
    from estream.package.reader import Package
    from estream.runtime.soc import find_soc
    from qnn_graphs.htp.contexts import compile_contexts

    socs = [find_soc(name.strip()) for name in dict.fromkeys(args.soc.split(","))]
    package = Package.open(args.package)
    report: dict[str, Any] = {}
    for soc in socs:
        started = time.monotonic()
        manifest = compile_contexts(package, soc, package.path / FOLDER / soc.name, say=console.more)
        report[soc.name] = figures(manifest)
        told = f"{len(manifest.graphs)} contexts, {format_bytes(report[soc.name]['context_bytes'])}"
        console.detail(_table(report[soc.name]["graphs"]))
        console.result(f"{args.package}: {soc.name}: {told} in {format_seconds(time.monotonic() - started)}")
    console.result_json({"package": args.package, "socs": report})
    return 0


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
