"""`estream plan`: the configuration that finishes a prompt first within a memory budget, and what it promises."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from estream.cli.console import Console
from estream.cli.options import add_json, check_outputs, file, positive, size
from estream.units import format_bytes, format_seconds, format_tokens

if TYPE_CHECKING:
    from estream.solver.profile import DeviceProfile
    from estream.solver.search import Plan

NAME = "plan"
HELP = "predict how long a prompt takes, in which memory, and choose the configuration"
DESCRIPTION = (
    "Chooses group, banks, reads at a time and prefetch mode for a prompt length and a memory budget, from what\n"
    "`calibrate` measured, and predicts time, bubble and peak memory. A budget that is too small is refused with the\n"
    "smallest that works."
)
EXAMPLE = "  estream plan olmoe.estream --tokens 2048 --memory 1GiB --plot plan.svg"
_WIDTH = 72


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Adds the package, the prompt and the budget."""
    parser.add_argument("package", metavar="PACKAGE", type=Path, help="a packed model (NAME.estream)")
    parser.add_argument("--tokens", metavar="N", type=positive, required=True, help="length of the prompt")
    parser.add_argument("--memory", metavar="SIZE", type=size, help="budget of the whole process, such as 1.5GiB")
    parser.add_argument("--profile", metavar="P", type=Path, help="what calibrate wrote (default: in the cache)")
    parser.add_argument(
        "--cpu-profile", metavar="F", type=file, help="of the same phone's CPU, beside its NPU's: which is faster?"
    )
    parser.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: all cores)")
    parser.add_argument("--plot", metavar="F.svg", type=file, help="draw the predicted timeline")
    add_json(parser)


def run(args: argparse.Namespace, console: Console) -> int:
    """Solves and prints."""
    from estream.package.reader import Package
    from estream.prompt import longest_prompt
    from estream.solver.crossover import compare
    from estream.solver.search import solve
    from estream.telemetry.plot import planned_tracks, timeline_svg
    from estream.whole_file import write_whole

    check_outputs({"--plot": args.plot}, args.package)
    package = Package.open(args.package)
    longest_prompt(args.tokens, package.architecture.context, "--tokens")
    profile = find_profile(package, args.profile, args.threads)
    foreign = foreign_fields(package, profile, args.threads) if args.profile is not None else []
    plan = solve(package, profile, args.tokens, memory=args.memory)
    crossover = None
    if args.cpu_profile is not None:
        cpu = find_profile(package, args.cpu_profile, args.threads)
        crossover = compare(package, profile, cpu, args.tokens, memory=args.memory)
    if args.plot is not None:
        title = f"{args.package.name}, {args.tokens} tokens, predicted: {format_seconds(plan.prediction.ttft_s)}"
        write_whole(args.plot, timeline_svg(planned_tracks(plan.prediction.timeline), title))
    if foreign:
        console.detail(f"note      {args.profile} is of another machine or version: {', '.join(foreign)}")
    console.detail(report(plan, scaled=profile.shape(package).scaled))
    if crossover is not None:
        console.result(f"cpu       {crossover.advice}")
    console.result(text_timeline(plan))
    console.result_json(
        {
            "package": args.package,
            "scaled": profile.shape(package).scaled,
            "foreign": foreign,
            "machine": profile.machine,
            **plan.to_dict(),
            "crossover": None if crossover is None else crossover.to_dict(),
        }
    )
    return 0


def find_profile(package: Any, path: Path | None, threads: int | None) -> DeviceProfile:
    """The profile at `path`, or the cache's of this machine. Raises ProfileError where there is none."""
    from estream.cache import cache_folder
    from estream.errors import UsageError
    from estream.solver.profile import DeviceProfile, ProfileError, load_profile

    if path is not None:
        if not path.is_file():
            raise UsageError(f"no profile {path}", next_step="Name a file that estream calibrate --out wrote")
        return DeviceProfile.read(path)
    profile = load_profile(this_machine(package, threads), cache_folder())
    if profile is None:
        with_threads = "" if threads is None else f" --threads {threads}"
        raise ProfileError(
            "this machine was not measured yet, or not with these threads, versions and disk",
            next_step=f"estream calibrate {package.path}{with_threads}",
        )
    return profile


def this_machine(package: Any, threads: int | None) -> dict[str, Any]:
    """What a profile of this machine is of."""
    from estream.runtime import open_target
    from estream.solver.profile import identify

    target = open_target("cpu", threads=threads)
    try:
        return identify("cpu", target.graphs, getattr(target, "threads", None), package.experts_file)
    finally:
        target.close()


def foreign_fields(package: Any, profile: DeviceProfile, threads: int | None) -> list[str]:
    """Fields in which a profile is not of this machine; to plan for another machine is what it may be for."""
    own = this_machine(package, threads)
    return [f"{name} {profile.machine.get(name)}" for name, value in own.items() if profile.machine.get(name) != value]


def report(plan: Plan, *, scaled: bool, word: str = "predicted") -> str:
    """The lines of a plan. word: what its time is."""
    chosen, prediction = plan.configuration, plan.prediction
    lines = [
        f"prompt    {format_tokens(plan.tokens)}",
        "experts   all in memory"
        if chosen.resident == "all"
        else f"paging    G={chosen.group} B={chosen.banks} Q={chosen.lanes}, prefetch {chosen.prefetch}, arena "
        f"{format_bytes(chosen.arena_bytes)}",
        f"time      {format_seconds(prediction.ttft_s)} {word}: flash alone {format_seconds(prediction.flash_s)}, "
        f"compute alone {format_seconds(prediction.compute_s)}; bubble {100 * prediction.bubble_rate:.1f} %",
        f"memory    {format_bytes(plan.peak_bytes)} at the peak"
        + (f" of {format_bytes(plan.memory)}" if plan.memory is not None else "")
        + (", dense weights paged" if chosen.dense_weights == "paged" else ""),
        f"bound by  {plan.bound}. {plan.advice[0].upper()}{plan.advice[1:]}",
    ]
    if chosen.pinned:
        lines.insert(
            3,
            f"again     {format_seconds(plan.again.ttft_s)} on an open engine: {format_bytes(chosen.pinned_bytes)} of "
            "experts stay in memory",
        )
    if scaled:
        lines.append("note      this shape was not measured: times are scaled from another. `calibrate` it to be sure")
    return "\n".join(lines)


def text_timeline(plan: Plan, label: str = "") -> str:
    """Two lines of characters: what flash and compute do over time. `#` busy, `.` idle. label: at their ends."""
    timeline, total = plan.prediction.timeline, plan.prediction.timeline.total_s or 1.0
    flash, experts = [0.0] * _WIDTH, [0.0] * _WIDTH
    for spans, cells in (
        (_joined([(start, end) for _, start, end in timeline.reads]), flash),
        ([(step.start_s, step.end_s) for step in timeline.steps], experts),
    ):
        for start, end in spans:
            first, last = start / total * _WIDTH, end / total * _WIDTH
            for cell in range(int(first), min(_WIDTH, int(last) + 1)):
                cells[cell] += max(0.0, min(last, cell + 1) - max(first, cell))
    drawn = {
        name: "".join("#" if share > 0.66 else "+" if share > 0.1 else "." for share in cells)
        for name, cells in (("flash", flash), ("experts", experts))
    }
    return "\n".join(f"{name:<8} |{line}| {label}".rstrip() for name, line in drawn.items())


def _joined(spans: list[tuple[float, float]]) -> list[tuple[float, float]]:
    joined: list[tuple[float, float]] = []
    for start, end in sorted(spans):
        if joined and start <= joined[-1][1]:
            joined[-1] = (joined[-1][0], max(joined[-1][1], end))
        else:
            joined.append((start, end))
    return joined
