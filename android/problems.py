"""What can be wrong with downloads: each problem is an error of its own, and all of them are told at once."""

from __future__ import annotations

from collections.abc import Sequence

from estream.errors import EStreamError

DAMAGED, UNFIT, MISSING = "damaged", "does not fit", "missing"
_KINDS = (DAMAGED, UNFIT, MISSING)


class BundleError(EStreamError):
    """A bundle, or a download that one is made of. `kind`: damaged, does not fit, missing."""

    def __init__(
        self, thing: str, *, kind: str = UNFIT, asked: object = None, had: object = None, next_step: str | None = None
    ) -> None:
        self.kind = kind
        super().__init__(thing, asked=asked, had=had, next_step=next_step)


class IncompleteError(BundleError):
    """Downloads that make no bundle. `problems`: all that was found; `summary`: how many of each kind."""

    def __init__(self, folder: object, problems: Sequence[BundleError]) -> None:
        self.problems = tuple(sorted(problems, key=lambda problem: (_KINDS.index(problem.kind), str(problem))))
        counts = [(sum(problem.kind == kind for problem in problems), kind) for kind in _KINDS]
        told = ", ".join(f"{count} {kind}" for count, kind in counts if count)
        self.summary = f"{folder} makes no bundle: {told}"
        super().__init__("; ".join([self.summary, *(f"{problem.kind}: {problem}" for problem in self.problems)]))
