"""Options of commands that open an engine, and what the engine is given for them."""

from __future__ import annotations

import argparse
from typing import Any

from estream.cli import npumoe
from estream.cli.options import add_soc, positive, size, whole
from estream.solver.automatic import DENSE_MODES, PREFETCH_MODES, RESIDENT_MODES
from estream.strategies import DEFAULT, STRATEGIES


def add_target(parser: argparse.ArgumentParser, *, default: str = "cpu") -> None:
    """--backend, --soc, --reference, --threads. default: of --backend."""
    group = parser.add_argument_group("target")
    group.add_argument(
        "--backend", choices=("cpu", "htp"), default=default, help=f"where the graphs run (default {default})"
    )
    add_soc(group)
    group.add_argument(
        "--reference", action="store_true", help="dequantise, then multiply in float32: what to compare with"
    )
    group.add_argument("--threads", metavar="N", type=positive, help="compute threads (default: the target's choice)")


def add_paging(parser: argparse.ArgumentParser, *, phone: bool = False) -> None:
    """The budget and the configuration. phone: strategies only that need nothing of this machine."""
    strategies = [name for name, one in STRATEGIES.items() if not phone or (one.exact and not one.weights_in_graphs)]
    group = parser.add_argument_group("configuration (what is left out is chosen)")
    group.add_argument(
        "--strategy",
        choices=tuple(strategies),
        default=DEFAULT,
        help=f"a name for options, which others may not contradict: docs/strategies.md (default {DEFAULT})",
    )
    group.add_argument("--memory", metavar="SIZE", type=size, help="budget of the whole process: 1.5GiB, 800M")
    group.add_argument("--group", metavar="G", type=positive, help="panels per group, the unit of reading")
    group.add_argument("--banks", metavar="B", type=positive, help="banks in the arena, one group each")
    group.add_argument("--lanes", metavar="Q", type=positive, help="outstanding flash reads")
    group.add_argument("--prefetch", choices=PREFETCH_MODES, default="auto", help="(default auto: by the length)")
    group.add_argument(
        "--resident", choices=RESIDENT_MODES, help="experts kept in memory (default: as the strategy says, else none)"
    )
    group.add_argument(
        "--pinned",
        metavar="N",
        type=whole,
        default=0,
        help="groups of each layer that stay in memory once read, for the prefills that follow (default 0)",
    )
    group.add_argument(
        "--dense",
        choices=DENSE_MODES,
        default="auto",
        help="attention and head weights in memory, or read layer by layer (default auto: as the budget allows)",
    )
    group.add_argument("--no-direct-io", action="store_true", help="read through the page cache")
    group.add_argument("--verify-reads", action="store_true", help="check all weights read against their checksums")
    if not phone:
        npumoe.add_arguments(parser)


def engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """The keywords of `Engine` that the options of both functions mean."""
    target = ("backend", "soc", "reference", "threads")
    paging = (
        "strategy",
        "memory",
        "group",
        "banks",
        "lanes",
        "prefetch",
        "resident",
        "pinned",
        "dense",
        "verify_reads",
    )
    named = {name: getattr(args, name) for name in (*target, *paging)}
    own = {"npumoe": npumoe.chosen(args, [args.strategy])} if hasattr(args, "calibration") else {}
    return {**named, "direct_io": not args.no_direct_io, **own}
