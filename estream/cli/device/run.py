"""`estream device run`: a prompt on the phone, with the report of `estream prefill`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from estream.cli import prompt, report
from estream.cli.configuration import add_paging, add_target, engine_options
from estream.cli.console import Console
from estream.cli.device.engine import BACKEND, advice, phone_options
from estream.cli.device.options import add_device, add_package, check_package, device_from
from estream.cli.options import add_json, check_outputs, file, positive
from estream.cli.progress import Progress

NAME = "run"
HELP = "run a prompt through a packed model on the phone"
DESCRIPTION = (
    "Makes token ids of the prompt here, runs them through the phone's copy of the packed model, and prints the most\n"
    "probable next tokens and the statistics. Ctrl-C ends the program on the phone, too."
)
EXAMPLE = """  estream device run olmoe.estream --prompt "The capital of France is"
  estream device run olmoe.estream --ids "510 5347 273" --backend cpu --memory 1.5GiB --json"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the prompt, the phone, the configuration and the outputs."""
    add_package(parser)
    prompt.add_arguments(parser)
    add_device(parser)
    add_target(parser, default=BACKEND)
    add_paging(parser, phone=True)
    output = parser.add_argument_group("output")
    output.add_argument("--top", metavar="K", type=positive, default=5, help="next tokens to print (default 5)")
    output.add_argument("--logits", metavar="F.npy", type=file, help="write the last token's logits, float32 [V]")
    output.add_argument("--hidden", metavar="F.npy", type=file, help="write the normed hidden states, float32 [N, H]")
    output.add_argument("--trace", metavar="F.json", type=file, help="write Chrome trace events (open in Perfetto)")
    output.add_argument("--keep", action="store_true", help="leave the run's folder on the phone")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Every mistake in the arguments is told before the phone is spoken to."""
    from android.run import run as run_on_phone
    from android.session import Listener
    from estream.package.reader import Package
    from estream.prompt import check_prompt

    check_package(args.package)
    check_outputs({"--logits": args.logits, "--hidden": args.hidden, "--trace": args.trace}, args.package)
    package = Package.open(args.package)
    tokenizer = prompt.tokenizer_for(args)
    architecture = package.architecture
    ids = check_prompt(prompt.prompt_ids(args, tokenizer), architecture, architecture.context)
    device, layout = device_from(args)
    options = phone_options(engine_options(args), device)
    crossover = advice(args, package, device.serial, len(ids))
    if crossover is not None:
        console.detail(f"  advice    {crossover.advice}")
    with Progress(console) as progress:

        def opened(configuration: dict[str, Any]) -> None:
            progress.close()
            console.detail(report.plan(package, len(ids), configuration))

        done = run_on_phone(
            device,
            layout,
            args.package,
            ids.tolist(),
            options,
            hidden=args.hidden is not None,
            trace=args.trace is not None,
            keep=args.keep,
            listener=Listener(progress, opened),
        )
    _write(args, done)
    following = report.next_tokens(done.logits, args.top, int(ids[-1]), tokenizer)
    console.result(report.answer(following))
    console.detail(report.statistics(done.stats, done.configuration))
    console.detail(report.device(done.device))
    if done.folder is not None:
        console.detail(f"  kept      {done.folder} on the phone")
    console.more(report.everything(done.stats, done.configuration))
    console.result_json(
        {
            "tokens": done.tokens,
            "next": following,
            "stats": done.stats,
            "configuration": done.configuration,
            "device": {**done.device, "folder": done.folder},
            "crossover": None if crossover is None else crossover.to_dict(),
        }
    )
    return 0


def _write(args: argparse.Namespace, done: Any) -> None:
    from estream.whole_file import write_whole

    for path, array in ((args.logits, done.logits), (args.hidden, done.hidden)):
        if path is not None:
            _write_array(path, array)
    if args.trace is not None:
        write_whole(args.trace, done.trace)


def _write_array(path: Path, array: Any) -> None:
    """As it came, complete or not at all."""
    import io

    import numpy as np

    from estream.whole_file import write_whole

    whole = io.BytesIO()
    np.save(whole, array)
    write_whole(path, whole.getvalue())
