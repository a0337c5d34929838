"""The ways to run a prefill that can be chosen by name: EStream's own, and those it is compared with.

A strategy is a name for options and, where it computes experts in another way, for the expert runner that does.
"""

from estream.strategies.registry import (
    DEFAULT,
    STRATEGIES,
    Panels,
    RunnerFactory,
    Strategy,
    find_strategy,
    parse_strategies,
)

__all__ = ["DEFAULT", "STRATEGIES", "Panels", "RunnerFactory", "Strategy", "find_strategy", "parse_strategies"]
