"""What a selftest found."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from estream.selftest.compare import Difference
from estream.selftest.prompts import LEAST_DIFFERENCE


@dataclass(frozen=True)
class SelftestReport:
    """reference: whether there was one to compare with; without it `differences` is empty.

    prompts_differ_by: relative difference of the logits of the two prompts; None where a run stopped. zero, same:
    outputs ("layer 3, qkv: v") that were zero, or the same for both prompts. stopped: why a run ended early.
    panels_per_expert: what the panel numbers of `differences` count in.
    """

    package: Path
    backend: str
    graphs: str
    simulated: bool
    tokens: int
    reference: bool
    panels_per_expert: int
    differences: Sequence[Difference]
    prompts_differ_by: float | None
    zero: Sequence[str]
    same: Sequence[str]
    stopped: str | None

    @property
    def first(self) -> Difference | None:
        """The first graph that diverged."""
        return next((item for item in self.differences if item.diverged), None)

    @property
    def faults(self) -> list[str]:
        """One sentence for each thing that is wrong; the first diverging graph first."""
        found = [] if self.first is None else [f"diverges from the reference, first in {self.describe(self.first)}"]
        if self.stopped is not None:
            found.append(f"stopped: {self.stopped}")
        if self.zero:
            found.append(f"{len(self.zero)} output(s) are zero, first {self.zero[0]}")
        if self.same:
            found.append(f"{len(self.same)} output(s) are the same for two prompts, first {self.same[0]}")
        if self.prompts_differ_by is not None and not self.prompts_differ_by >= LEAST_DIFFERENCE:
            least = f"at least {LEAST_DIFFERENCE:g} is expected"
            found.append(f"the logits of two prompts differ by {self.prompts_differ_by:.2g} only ({least})")
        return found

    @property
    def ok(self) -> bool:
        return not self.faults

    def describe(self, item: Difference) -> str:
        """'layer 3, expert, y of expert 5, token 7: error 1.4 (allowed 0.7), median row 0.1 (allowed 0.25)'."""
        layer = "" if item.graph in ("final_norm", "head") else f"layer {item.layer}, "
        panel = "" if item.panel is None else f" of {'slice' if item.graph == 'head' else 'panel'} {item.panel}"
        if item.panel is not None and item.graph == "expert":
            expert, part = divmod(item.panel, self.panels_per_expert)
            panel = f" of expert {expert}" + (f", panel {part}" if self.panels_per_expert > 1 else "")
        allowed = item.tolerance
        note = f" ({item.note})" if item.note else ""
        return (
            f"{layer}{item.graph}, {item.output}{panel}, token {item.row}: error {item.error:.2g}{note} (allowed "
            f"{allowed.worst:g}), median row {item.typical:.2g} (allowed {allowed.typical:g})"
        )

    def to_dict(self) -> dict[str, object]:
        """JSON-ready; an infinite error is null."""
        return {
            **asdict(self),
            "package": str(self.package),
            "differences": [self._difference(item) for item in self.differences],
            "first": None if self.first is None else self._difference(self.first),
            "faults": self.faults,
            "ok": self.ok,
        }

    def _difference(self, item: Difference) -> dict[str, object]:
        finite = {name: value if value < float("inf") else None for name, value in _errors(item).items()}
        return {**asdict(item), **finite, "diverged": item.diverged}


def _errors(item: Difference) -> dict[str, float]:
    return {"error": item.error, "typical": item.typical}
