"""The configuration for a machine that was measured: the solver's, from the profile in the user's cache."""

from __future__ import annotations

from estream.cache import cache_folder
from estream.errors import MemoryBudgetError
from estream.package.reader import Package
from estream.runtime.target import Target
from estream.solver.automatic import Configuration
from estream.solver.profile import ProfileError, identify, load_profile
from estream.solver.search import solve


def tuned(package: Package, target: Target, tokens: int, memory: int | None) -> Configuration | None:
    """What the solver chooses for prompts of `tokens` in `memory` bytes; None where this machine, target and disk were
    not measured, or not for packages with these schemes."""
    if target.name != "cpu":
        return None
    threads = getattr(target, "threads", None)
    profile = load_profile(identify(target.name, target.graphs, threads, package.experts_file), cache_folder())
    if profile is None:
        return None
    try:
        return solve(package, profile, tokens, memory=memory).configuration
    except (ProfileError, MemoryBudgetError):
        return None
