"""All strategies: what each is called, the options that it stands for, and what runs its experts.

The standard library only, and nothing heavy: the command line asks for the names before it knows what it is to do.
"""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from estream.errors import UsageError

if TYPE_CHECKING:
    from estream.layers.targets import ExpertPart, RunnerOpening
    from estream.opening import Options
    from estream.package.layout import PoolLayout

# Opens what computes experts (`estream.layers.targets.ExpertPart`). Runs once, while an engine opens.
RunnerFactory = Callable[["RunnerOpening", "Options"], "ExpertPart"]

DEFAULT = "estream"


class Panels(Enum):
    """A group size that follows from the package."""

    EXPERT = "one expert"
    LAYER = "a whole layer"

    def count(self, pool: PoolLayout) -> int:
        return pool.panels_per_expert if self is Panels.EXPERT else pool.panels_per_layer


@dataclass(frozen=True)
class Strategy:
    """A way to run a prefill.

    options: fields of `Options` and the values that the name stands for; without: fields that mean nothing here; own:
    fields that it needs and no other strategy has, and what the command line calls each.
    exact: every routed token is computed with the package's weights. weights_in_graphs: its graphs hold the experts'
    weights, none is paged. runner: opens what computes experts; None: the target's own. check: refuses a package, by
    its layout, before anything is loaded.
    """

    name: str
    summary: str
    options: Mapping[str, object] = field(default_factory=dict)
    without: tuple[str, ...] = ()
    own: Mapping[str, str] = field(default_factory=dict)
    exact: bool = True
    weights_in_graphs: bool = False
    runner: RunnerFactory | None = None
    check: Callable[[PoolLayout], None] | None = None

    @property
    def own_budget(self) -> bool:
        """Its smallest memory budget is not that of smaller groups."""
        return bool({"group", "resident"} & self.options.keys())

    def resolve(self, given: Mapping[str, object], pool: PoolLayout) -> dict[str, object]:
        """The values of `options` for a package. given: what the user chose, by field.

        Raises UsageError where a chosen value is not the one that the name stands for, is another strategy's, or is
        missing.
        """
        for name, called in self.own.items():
            if name not in given:
                raise UsageError(f"--strategy {self.name} needs {called}", next_step="Give one")
        for other in STRATEGIES.values():
            for name, called in other.own.items():
                if name in given and name not in self.own:
                    raise UsageError(
                        f"{called} is of --strategy {other.name}",
                        asked=f"--strategy {self.name}",
                        next_step="Leave it out, or choose that strategy",
                    )
        values = {
            name: value.count(pool) if isinstance(value, Panels) else value for name, value in self.options.items()
        }
        for name, chosen in given.items():
            if name in self.without or (name in values and values[name] != chosen):
                raise UsageError(
                    f"--strategy {self.name} and --{name} {chosen} exclude each other",
                    had=f"{self.name} has no {name}"
                    if name in self.without
                    else f"{name} is {self._told(name, values)}",
                    next_step="Leave one of the two out",
                )
        return values

    def _told(self, name: str, values: Mapping[str, object]) -> str:
        fixed = self.options[name]
        return f"{values[name]}, {fixed.value}" if isinstance(fixed, Panels) else str(values[name])


def _padded(opening: RunnerOpening, options: Options) -> ExpertPart:
    from estream.strategies.padded import open_padded

    return open_padded(opening)


def _per_expert(opening: RunnerOpening, options: Options) -> ExpertPart:
    from estream.strategies.per_expert import open_per_expert

    return open_per_expert(opening, options)


def _npumoe(opening: RunnerOpening, options: Options) -> ExpertPart:
    from estream.strategies.npumoe import open_npumoe

    return open_npumoe(opening, options)


MAX_CONTEXTS = 8  # what phones hold at a time, in a process


def _check_contexts(pool: PoolLayout) -> None:
    asked = len(pool.moe_layers) * pool.experts
    if asked > MAX_CONTEXTS:
        raise UsageError(
            "--strategy per-expert-graph needs a context for every expert of every layer",
            asked=f"{asked} contexts",
            had=f"a limit of {MAX_CONTEXTS} in a process on phones",
            next_step="Use a model with fewer experts, or another strategy",
        )


_UNPAGED = ("group", "banks", "prefetch")
_ALL = (
    Strategy(DEFAULT, "panels paged group by group, read ahead of the compute; everything left open is chosen"),
    Strategy(
        "resident",
        "all experts in memory, nothing is read in a prefill",
        options={"resident": "all", "pinned": 0},
        without=_UNPAGED,
    ),
    Strategy(
        "on-demand",
        "expert by expert, each read when its turn comes and not before",
        options={"prefetch": "on-demand", "group": Panels.EXPERT, "resident": "none", "pinned": 0},
    ),
    Strategy(
        "layer-streaming",
        "whole layers, one computed while the next is read",
        options={
            "prefetch": "before-routing",
            "group": Panels.LAYER,
            "banks": 2,
            "resident": "none",
            "pinned": 0,
        },
    ),
    Strategy("cpu-only", "as estream, on the processor whatever else there is", options={"backend": "cpu"}),
    Strategy(
        "padded",
        "every expert computes the rows of a static graph that could hold the whole prompt, routed to it or not",
        options={"prefetch": "before-routing"},
        runner=_padded,
    ),
    Strategy(
        "per-expert-graph",
        "a graph for each expert with its weights as constants, built when the engine opens",
        options={"resident": "all", "pinned": 0},
        without=_UNPAGED,
        weights_in_graphs=True,
        runner=_per_expert,
        check=_check_contexts,
    ),
    Strategy(
        "npumoe",
        "static capacities from calibration, overflow dropped, experts in groups, cold ones on the processor",
        own={"npumoe": "--calibration"},
        exact=False,
        runner=_npumoe,
    ),
)
STRATEGIES: dict[str, Strategy] = {strategy.name: strategy for strategy in _ALL}


def find_strategy(name: str) -> Strategy:
    """By name. Raises UsageError for an unknown one."""
    found = STRATEGIES.get(name)
    if found is None:
        near = difflib.get_close_matches(str(name), STRATEGIES, 1)
        raise UsageError(
            "unknown strategy",
            asked=name,
            had=", ".join(STRATEGIES),
            next_step=f"Did you mean {near[0]}?" if near else "Choose one of these",
        )
    return found


def parse_strategies(text: str) -> list[Strategy]:
    """'a,b' → strategies in that order. Raises UsageError: none, an unknown one, one twice."""
    names = [name.strip() for name in text.split(",")]
    if not all(names):
        raise UsageError("a strategy's name is empty", asked=repr(text), next_step="Give names like estream,on-demand")
    if len(set(names)) < len(names):
        raise UsageError("a strategy is named twice", asked=text)
    return [find_strategy(name) for name in names]
