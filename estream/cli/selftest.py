"""`estream selftest`: a target against the reference lowering, layer by layer."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING

from estream.cli.console import Console
from estream.cli.options import add_json, add_soc, folder, positive
from estream.units import format_tokens

if TYPE_CHECKING:
    from estream.selftest.compare import Difference
    from estream.selftest.report import SelftestReport

NAME = "selftest"
HELP = "compare a target with the reference lowering"
DESCRIPTION = (
    "Runs a prompt of random tokens through the target and through the reference lowering (dequantise, then float32),\n"
    "each layer with the reference's input, and names the first graph that diverges; then a second prompt, which must\n"
    "give another answer. Exit status 1 when anything is wrong."
)
EXAMPLE = "  estream selftest olmoe.estream\n  estream selftest olmoe.estream --tokens 33"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the target and the prompts' length."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu", help="the target to test (default cpu)")
    add_soc(parser)
    parser.add_argument("--tokens", metavar="N", type=positive, default=64, help="length of the prompts (default 64)")
    parser.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: the target's choice)")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Runs the test and prints a table of layers and graphs, and the verdict. Returns 1 if anything is wrong."""
    from estream.selftest import selftest

    report = selftest(
        args.package,
        args.backend,
        tokens=args.tokens,
        threads=args.threads,
        soc=args.soc,
        stage=lambda what: console.more(f"running: {what}"),
    )
    if report.differences:
        console.detail(_layers(report) + "\n\n" + _graphs(report))
    where = f"{report.backend}{', simulated' if report.simulated else ''}, {format_tokens(report.tokens)}"
    if not report.reference:
        console.detail("no reference graphs in this package: only finite, zero and two prompts were checked")
    for fault in report.faults:
        console.result(f"{args.package}: {fault}")
    differ = "" if report.prompts_differ_by is None else f"; two prompts differ by {report.prompts_differ_by:.2g}"
    console.result(f"{args.package}: {'passed' if report.ok else 'FAILED'} ({where}{differ})")
    console.result_json(report.to_dict())
    return 0 if report.ok else 1


def _layers(report: SelftestReport) -> str:
    """One line per layer: the largest relative error of a row, a ! where it is too large."""
    graphs = [graph for graph in _order(report) if graph not in ("final_norm", "head")]
    cells = {(item.layer, item.graph): item for item in report.differences}
    lines = ["largest relative error of a row", f"{'layer':>5}  " + "".join(f"{graph:>11}" for graph in graphs)]
    for layer in sorted({item.layer for item in report.differences if item.graph in graphs}):
        lines.append(f"{layer:>5}  " + "".join(_cell(cells.get((layer, graph))) for graph in graphs))
    return "\n".join(line.rstrip() for line in lines)


def _order(report: SelftestReport) -> list[str]:
    """The graphs that were compared, in the order of the work."""
    from estream.selftest.compare import ORDER

    return [graph for graph in ORDER if any(item.graph == graph for item in report.differences)]


def _cell(item: Difference | None) -> str:
    if item is None:
        return f"{'-':>11}"
    return f"{item.error:>10.4f}{'!' if item.diverged else ' '}"


def _graphs(report: SelftestReport) -> str:
    """One line per graph: over all layers, and what is allowed."""
    lines = [f"{'graph':<12}{'largest':>10}{'allowed':>10}{'median row':>13}{'allowed':>10}"]
    for graph in _order(report):
        found = [item for item in report.differences if item.graph == graph]
        error, typical = max(item.error for item in found), max(item.typical for item in found)
        allowed = found[0].tolerance
        lines.append(f"{graph:<12}{error:>10.4f}{allowed.worst:>10.4g}{typical:>13.4f}{allowed.typical:>10.4g}")
    return "\n".join(lines)
