"""`estream simulate`: `plan` for a phone that is not at hand, from published figures. Nothing of it is measured."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estream.cli.console import Console
from estream.cli.options import add_json, check_outputs, file, positive, size, whole
from estream.cli.plan import report, text_timeline
from estream.package.layout import DENSE_SCHEMES, INTEGER_SCHEMES, SCHEMES
from estream.units import format_seconds

if TYPE_CHECKING:
    import numpy as np

    from estream.package.reader import Package

EXPERTS = tuple(scheme for scheme in SCHEMES if scheme in INTEGER_SCHEMES)  # what phones are given
DENSE = tuple(scheme for scheme in DENSE_SCHEMES if scheme != "f32")

NAME = "simulate"
HELP = "predict a prompt on a phone that is not at hand"
DESCRIPTION = (
    "Runs the solver and the flash pipeline on a virtual clock with a phone's published figures, for a packed model\n"
    "or for a public model's shape, of which nothing needs to be on disk. Nothing is measured: docs/simulation.md\n"
    "says what the figures come from, and how far published times are met."
)
EXAMPLE = "  estream simulate qwen3-30b-a3b --device oneplus15 --tokens 4096 --memory 1.87GiB --plot simulated.svg"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the model, the phone, the prompt and what is decided."""
    from estream.package.presets import PRESETS
    from estream.solver.phone import phones
    from estream.solver.simulate import SIMULATED

    parser.add_argument(
        "model", metavar="PACKAGE|PRESET", help=f"a packed model (NAME.estream), or a shape: {', '.join(PRESETS)}"
    )
    parser.add_argument("--device", choices=phones(), required=True, help="the phone")
    parser.add_argument("--tokens", metavar="N", type=positive, required=True, help="length of the prompt")
    parser.add_argument("--memory", metavar="SIZE", type=size, help="budget of the whole process, such as 1.5GiB")
    parser.add_argument(
        "--strategy", choices=tuple(SIMULATED), default="estream", help="how to prefill (default estream)"
    )
    parser.add_argument(
        "--prefetch",
        choices=("before-routing", "after-routing", "on-demand"),
        help="when reading starts (default: the solver's choice)",
    )
    load = parser.add_mutually_exclusive_group()
    load.add_argument("--load", metavar="F.json", type=file, help="rows per expert that were recorded")
    load.add_argument(
        "--skew", metavar="S", type=skew, default=0.0, help="draw experts with weights rank^-S (default 0; 1: Zipf)"
    )
    parser.add_argument("--seed", metavar="S", type=whole, help="seed of what is drawn (default 0)")
    parser.add_argument("--experts", choices=EXPERTS, help="of a preset: weight scheme of the experts (default int4)")
    parser.add_argument("--dense", choices=DENSE, help="of a preset: weight scheme of attention and head")
    parser.add_argument("--plot", metavar="F.svg", type=file, help="draw the simulated timeline")
    add_json(parser)


def skew(text: str) -> float:
    """An argparse type: an exponent from 0 to 10."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value <= 10:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number from 0 to 10")
    return value


def run(args: argparse.Namespace, console: Console) -> int:
    """Simulates and prints."""
    from estream.errors import UsageError
    from estream.prompt import longest_prompt
    from estream.solver.phone import load_phone
    from estream.solver.simulate import simulate_prefill
    from estream.telemetry.plot import planned_tracks, timeline_svg
    from estream.whole_file import write_whole
    from qnn_graphs.htp.build import default_plan

    if args.load is not None and args.seed is not None:
        raise UsageError("--load and --seed exclude each other: nothing is drawn", next_step="Leave one of the two out")
    package, phone = find_model(args.model, args.experts, args.dense), load_phone(args.device)
    check_outputs({"--plot": args.plot}, package.path)
    longest_prompt(args.tokens, package.architecture.context, "--tokens")
    schemes = package.manifest
    ladder = default_plan(package.architecture, experts=schemes.experts, dense=schemes.dense).ladder
    plan = simulate_prefill(
        package,
        phone,
        args.tokens,
        find_load(package, args),
        sorted(ladder, key=lambda rung: -rung[1]),
        memory=args.memory,
        strategy=args.strategy,
        prefetch=args.prefetch,
    )
    if args.plot is not None:
        title = f"{package.path.name}, {args.tokens} tokens, {args.strategy} on {phone.machine['name']}, simulated: "
        title += format_seconds(plan.prediction.ttft_s)
        write_whole(args.plot, timeline_svg(planned_tracks(plan.prediction.timeline), title))
    fitted = "" if phone.machine["fitted"] else "; its figures were not fitted to published times"
    console.detail(
        f"device    {phone.machine['name']} ({phone.machine['soc']}), simulated: nothing was measured{fitted}"
    )
    console.detail(report(plan, scaled=False, word="simulated"))
    console.result(text_timeline(plan, "simulated"))
    console.result_json(
        {
            "package": str(args.model),
            "scaled": False,
            "foreign": [],
            "machine": {**phone.machine, "strategy": args.strategy},
            **plan.to_dict(),
            "crossover": None,
            "simulated": True,
        }
    )
    return 0


def find_model(model: str, experts: str | None, dense: str | None) -> Package:
    """A package that is there, or else a preset's outline. Raises UsageError for schemes of a package, PackageError."""
    from estream.errors import UsageError
    from estream.package.outline import outline
    from estream.package.presets import PRESETS
    from estream.package.reader import Package

    if model in PRESETS:
        return outline(model, experts=experts or "int4", dense=dense)
    if not Path(model).exists():
        raise UsageError("no such package or preset", asked=model, had=", ".join(sorted(PRESETS)))
    if experts is not None or dense is not None:
        raise UsageError("--experts and --dense are a preset's; a package has its schemes", next_step="Leave them out")
    return Package.open(model)


def find_load(package: Package, args: Any) -> list[np.ndarray]:
    """Rows per expert of each MoE layer."""
    from estream.solver.load import draw_counts, read_load

    arch, layers = package.architecture, len(package.pool.moe_layers)
    if args.load is not None:
        return read_load(args.load, arch.experts, arch.top_k, layers, args.tokens)
    return draw_counts(arch.experts, arch.top_k, args.tokens, layers, skew=args.skew, seed=args.seed or 0)
