"""`estream perplexity`: how well a packed model predicts a text, and how near a target is to the reference."""

from __future__ import annotations

import argparse
from contextlib import ExitStack
from functools import partial
from typing import TYPE_CHECKING, Any

from estream.cli import prompt
from estream.cli.configuration import add_paging, add_target, engine_options
from estream.cli.console import Console, table
from estream.cli.options import add_json, file, folder, positive
from estream.cli.progress import Progress
from estream.strategies import STRATEGIES
from estream.units import format_count, format_tokens

if TYPE_CHECKING:
    from estream.engine import Engine
    from estream.package.reader import Package
    from estream.quality import Agreement, Quality

NAME = "perplexity"
HELP = "how well a packed model predicts a text"
DESCRIPTION = (
    "Cuts a text into windows of N tokens, each a prompt of its own, and predicts every token but the first of its\n"
    "window (a single token left at the end is left out). Logits are taken block by block, in float64. --agreement\n"
    "then runs the float32 reference lowering of the same package over the same windows; until then, the logits of\n"
    "the first run are kept in the folder for temporary files ($TMPDIR): tokens x vocabulary x 4 bytes."
)
EXAMPLE = """  estream perplexity olmoe.estream --text book.txt --tokens 512 --limit 16
  estream perplexity olmoe.estream --text book.txt --strategy padded --limit 1 --agreement --json"""
WINDOW = 512


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the text, the windows, the target and the configuration."""
    parser.add_argument("package", metavar="PACKAGE", type=folder, help="a packed model (NAME.estream)")
    text = parser.add_argument_group("text (exactly one)").add_mutually_exclusive_group(required=True)
    text.add_argument("--text", metavar="F", type=file, help="UTF-8 text from a file (- for stdin)")
    text.add_argument("--ids-file", metavar="F", type=file, help="token ids from a file (- for stdin)")
    parser.add_argument(
        "--tokens",
        metavar="N",
        type=positive,
        help=f"tokens of a window (default {WINDOW}, or the model's context if shorter)",
    )
    parser.add_argument("--limit", metavar="W", type=positive, help="at most so many windows (default: the whole text)")
    parser.add_argument("--agreement", action="store_true", help="also compare with the float32 reference lowering")
    add_target(parser)
    add_paging(parser)
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Measures and prints. Every mistake in the arguments is told before any work."""
    from estream.engine import Engine
    from estream.errors import UsageError
    from estream.package.reader import Package
    from estream.prompt import check_prompt, longest_prompt
    from estream.quality import agreement, perplexity, split_windows
    from estream.selftest.run import has_reference

    if args.agreement and args.reference:
        raise UsageError("--agreement compares with --reference", next_step="Leave out one of them")
    package = Package.open(args.package)
    arch = package.architecture
    if args.agreement and not has_reference(package):
        raise UsageError(f"{args.package} has no reference graphs", next_step="Copy the whole package, or pack again")
    length = longest_prompt(args.tokens or min(WINDOW, arch.context), arch.context, "--tokens")
    ids = _ids(args)
    windows = split_windows(check_prompt(ids, arch, len(ids)), length, args.limit)
    used = sum(map(len, windows))
    longest = len(windows[0])
    with ExitStack() as stack:
        progress = stack.enter_context(Progress(console))
        layers = _Layers(progress, "perplexity", len(windows))
        open_engine = partial(Engine, args.package, **engine_options(args), max_tokens=longest, progress=layers)
        near: Agreement | None = None
        if args.agreement:
            layers = _Layers(progress, "reference", len(windows))
            open_reference = partial(
                Engine,
                args.package,
                memory=args.memory,
                reference=True,
                threads=args.threads,
                max_tokens=longest,
                progress=layers,
            )
            quality, near = agreement(partial(_opened, open_engine, package), open_reference, windows)
        else:
            with _opened(open_engine, package) as engine:
                quality = perplexity(engine, windows)
    console.result(_report(quality, near, length, exact=STRATEGIES[args.strategy].exact))
    if quality.configuration.get("simulated"):
        console.detail(f"simulated: numbers are those of the HTP of {quality.configuration['soc']}")
    console.result_json(
        {
            "package": args.package,
            "window": length,
            **_figures(quality),
            "tokens_left_out": len(ids) - used,
            "agreement": None
            if near is None
            else {
                "reference": _figures(near.reference),
                "change": near.change,
                "same": near.same,
                "divergence": near.divergence,
            },
            "configuration": quality.configuration,
        }
    )
    return 0


def _ids(args: argparse.Namespace) -> list[int]:
    """The text's token ids, as `prefill` would take them. Raises UsageError: empty, not UTF-8; PackageError: no
    tokenizer."""
    from estream.errors import PackageError, UsageError

    if args.ids_file is not None:
        return prompt.parse_ids(prompt.read_text(args.ids_file, "--ids-file"), f"--ids-file {args.ids_file}")
    text = prompt.read_text(args.text, "--text")
    if not text:
        raise UsageError(f"--text {args.text}: the text is empty", next_step="Give a text of 2 tokens at least")
    tokenizer = prompt.load_tokenizer(args.package)
    if tokenizer is None:
        raise PackageError(f"{args.package} has no tokenizer", next_step="Give token ids with --ids-file")
    return list(tokenizer.encode(text))


def _opened(open_engine: Any, package: Package) -> Engine:
    """An engine on the package whose tokenizer was read, or PackageError."""
    engine: Engine = open_engine()
    try:
        package.check_unchanged()
    except BaseException:
        engine.close()
        raise
    return engine


class _Layers:
    """Progress of all windows together, in layers, from each prefill's own."""

    def __init__(self, progress: Progress, stage: str, windows: int) -> None:
        self._progress, self._stage, self._windows, self._begun = progress, stage, windows, 0

    def __call__(self, stage: str, done: int, total: int) -> None:
        if stage != "prefill":
            self._progress(stage, done, total)
            return
        self._begun += done == 0
        self._progress(self._stage, (self._begun - 1) * total + done, self._windows * total)


def _figures(quality: Quality) -> dict[str, Any]:
    return {
        "windows": quality.windows,
        "tokens": quality.tokens,
        "predicted": quality.predicted,
        "loss": quality.loss,
        "perplexity": quality.perplexity,
        "dropped_rate": quality.dropped_rate,
    }


def _report(quality: Quality, near: Agreement | None, length: int, *, exact: bool) -> str:
    windows = f"{format_count(quality.windows, 'window')} of up to {format_tokens(length)}"
    told = f"over {quality.predicted} predicted tokens ({windows}; {quality.loss:.4f} nats per token)"
    rows = [("perplexity", f"{quality.perplexity:.4f} {told}")]
    if near is not None:
        rows += [
            ("reference", f"{near.reference.perplexity:.4f}: this is {near.change:+.3%}"),
            ("agreement", f"same first token at {near.same:.2%} of {quality.tokens} positions"),
            ("divergence", f"KL(reference‖this) {near.divergence:.3g} nats per position"),
        ]
    if quality.dropped_rate is not None and not exact:
        rows.append(("dropped", f"{quality.dropped_rate:.2%} of (token, expert) pairs"))
    return table(rows)
