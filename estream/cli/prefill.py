"""`estream prefill`: a prompt in, the next token out, and where the time, the bytes and the memory went."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from pathlib import Path
from typing import Any

from estream.cli import prompt, report
from estream.cli.configuration import add_paging, add_target, engine_options
from estream.cli.console import Console
from estream.cli.options import add_json, check_outputs, file, folder, positive
from estream.cli.progress import Progress

NAME = "prefill"
HELP = "run a prompt through a packed model"
DESCRIPTION = "Runs a prompt through a packed model and prints the most probable next tokens and the statistics."
EXAMPLE = """  estream prefill olmoe.estream --prompt "The capital of France is"
  estream prefill olmoe.estream --ids "510 5347 273 6181 310" --memory 1.5GiB --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the prompt, the configuration and the outputs."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    prompt.add_arguments(parser)
    add_target(parser)
    add_paging(parser)
    output = parser.add_argument_group("output")
    output.add_argument("--top", metavar="K", type=positive, default=5, help="next tokens to print (default 5)")
    output.add_argument("--all-logits", metavar="F.npy", type=file, help="write every token's logits, float32 [N, V]")
    output.add_argument("--trace", metavar="F.json", type=file, help="write Chrome trace events (open in Perfetto)")
    output.add_argument("--plot", metavar="F.svg", type=file, help="draw the measured timeline")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Opens the package, runs the prompt, prints the answer. Every mistake in the arguments is told before any work."""
    from estream.engine import Engine
    from estream.package.reader import Package
    from estream.prompt import check_prompt

    outputs = {"--all-logits": args.all_logits, "--trace": args.trace, "--plot": args.plot}
    check_outputs(outputs, args.package)
    package = Package.open(args.package)
    tokenizer = prompt.tokenizer_for(args)
    architecture = package.architecture
    ids = check_prompt(prompt.prompt_ids(args, tokenizer), architecture, architecture.context)
    trace = _trace(args.trace or args.plot)
    with ExitStack() as stack:
        sink = None
        if args.all_logits is not None:
            sink = stack.enter_context(_npy_sink(args.all_logits, len(ids), architecture.vocab))
        progress = stack.enter_context(Progress(console))
        engine = stack.enter_context(
            Engine(args.package, **engine_options(args), max_tokens=len(ids), trace=trace, progress=progress)
        )
        package.check_unchanged()  # the tokenizer was read by name
        progress.close()
        configuration = engine.configuration | {"prefetch": engine.prefetch_for(len(ids))}
        console.detail(report.plan(package, len(ids), configuration))
        result = engine.prefill(ids, logits="last" if sink is None else "all", logits_sink=sink)
        progress.close()
        last = result.logits if sink is None else sink.row(len(ids) - 1)
        assert last is not None, "logits were asked for"
        following = report.next_tokens(last, args.top, int(ids[-1]), tokenizer)
    if trace is not None and args.trace is not None:
        trace.write(args.trace)
    if trace is not None and args.plot is not None:
        _plot(args.plot, trace, args.package, result)
    stats = result.stats.to_dict()
    console.result(report.answer(following))
    console.detail(report.statistics(stats, result.configuration))
    if result.configuration.get("simulated"):
        console.detail(report.simulated(result.configuration["soc"]))
    console.more(report.everything(stats, result.configuration))
    console.result_json(
        {"tokens": result.tokens, "next": following, "stats": stats, "configuration": result.configuration}
    )
    return 0


def _trace(path: Path | None) -> Any | None:
    if path is None:
        return None
    from estream.telemetry.trace import Trace

    return Trace()


def _plot(path: Path, trace: Any, package: Path, result: Any) -> None:
    from estream.telemetry.plot import measured_tracks, timeline_svg
    from estream.units import format_seconds
    from estream.whole_file import write_whole

    title = f"{package.name}, {result.tokens} tokens, measured: {format_seconds(result.stats.ttft_s)}"
    write_whole(path, timeline_svg(measured_tracks(trace), title))


def _npy_sink(path: Path, rows: int, columns: int) -> Any:
    from estream.cli.npy_sink import NpySink

    return NpySink(path, rows, columns)
