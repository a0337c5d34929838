"""`estream calibrate-experts`: how often each expert is chosen in a text, for strategy npumoe."""

from __future__ import annotations

import argparse
import logging
from pathlib import Path
from typing import TYPE_CHECKING

from estream.cli import prompt
from estream.cli.console import Console
from estream.cli.options import add_json, add_soc, check_outputs, file, folder, positive, size, whole
from estream.cli.progress import Progress
from estream.units import format_count, format_tokens

if TYPE_CHECKING:
    from estream.strategies.loads import ExpertLoads

NAME = "calibrate-experts"
HELP = "measure how often each expert is chosen in a text, for --strategy npumoe"
DESCRIPTION = (
    "Prefills windows of a text and records, for each expert of each layer, how many rows it got: the mean, quantiles\n"
    "over the windows, and its share of all tokens. The same package, text and seed give the same bytes. The file is\n"
    "of this package only."
)
EXAMPLE = "  estream calibrate-experts olmoe.estream --text book.txt --tokens 16384 --out olmoe-experts.json"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the text and the output."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    text = parser.add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="F", type=file, help="UTF-8 text (- for stdin)")
    text.add_argument("--ids-file", metavar="F", type=file, help="token ids instead, of a package without tokenizer")
    parser.add_argument("--tokens", metavar="N", type=positive, help="of the text, at most (default: all of it)")
    parser.add_argument("--window", metavar="N", type=positive, help="tokens of a prefill (default 512)")
    parser.add_argument(
        "--seed", metavar="S", type=whole, default=0, help="chooses windows of a longer text (default 0)"
    )
    parser.add_argument("--out", metavar="F.json", type=file, help="file to write (default: PACKAGE-experts.json here)")
    parser.add_argument("--backend", choices=("cpu", "htp"), default="cpu", help="where the graphs run (default cpu)")
    add_soc(parser)
    parser.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: the target's choice)")
    parser.add_argument("--memory", metavar="SIZE", type=size, help="budget of the whole process")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Prefills the windows, writes the file, prints what it says of the loads."""
    import numpy as np

    from estream.calibrate.experts import WINDOW, measure_loads, text_windows
    from estream.engine import Engine
    from estream.errors import PackageError
    from estream.package.reader import Package
    from estream.prompt import check_prompt, longest_prompt

    package = Package.open(args.package)
    out = args.out or Path(f"{Path(args.package).resolve().name.removesuffix('.estream')}-experts.json")
    check_outputs({"--out": out}, args.package)
    context = package.architecture.context
    window = longest_prompt(args.window or min(WINDOW, context), context, "--window")
    if args.text is None:
        ids = prompt.parse_ids(prompt.read_text(args.ids_file, "--ids-file"), f"--ids-file {args.ids_file}")
    else:
        tokenizer = prompt.load_tokenizer(args.package)
        if tokenizer is None:
            raise PackageError(f"{args.package} has no tokenizer", next_step="Give token ids with --ids-file")
        ids = list(tokenizer.encode(prompt.read_text(args.text, "--text"), special=False))
    windows = text_windows(np.array(ids, np.int64), args.tokens, window, args.seed)
    if windows.shape[1] < window:
        logging.getLogger("estream.cli").warning(
            "the text has %s, less than a window of %d: capacities for longer prompts are a guess",
            format_tokens(windows.shape[1]),
            window,
        )
    for one in windows:
        check_prompt(one.tolist(), package.architecture, context)
    with Progress(console) as progress:
        engine = Engine(
            args.package,
            args.backend,
            args.memory,
            threads=args.threads,
            max_tokens=windows.shape[1],
            soc=args.soc,
            progress=progress,
        )
        with engine:
            loads = measure_loads(engine, windows, args.seed)
    loads.write(out)
    console.detail(_report(loads))
    console.result(f"{out}: {format_tokens(loads.tokens)} in {format_count(len(windows), 'window')}")
    console.result_json({"calibration": str(out), **loads.to_dict()})
    return 0


def _report(loads: ExpertLoads) -> str:
    lines = [f"{'layer':>5}  {'least chosen':>12}  {'median':>8}  {'most chosen':>11}   share of the tokens"]
    for layer, shares in loads.popularity.items():
        ordered = sorted(shares.tolist())
        middle = ordered[len(ordered) // 2]
        lines.append(f"{layer:>5}  {100 * ordered[0]:>10.2f} %  {100 * middle:>6.2f} %  {100 * ordered[-1]:>9.2f} %")
    return "\n".join(lines)
