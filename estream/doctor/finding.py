"""One thing that was looked at."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Literal

from estream.errors import EStreamError

Status = Literal["ok", "warning", "missing"]
Need = Literal["cpu", "htp", "host"]


@dataclass(frozen=True)
class Finding:
    """found: what there is, or what went wrong. needed_for: `cpu` (so everything), `htp`, or `host` (packing, text).

    next_step: what to do about what is not ok.
    """

    area: str
    name: str
    status: Status
    found: str
    needed_for: Need = "cpu"
    next_step: str | None = None

    @property
    def fails(self) -> bool:
        """Whether target cpu does not work for this reason."""
        return self.status == "missing" and self.needed_for == "cpu"

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


def missing(area: str, name: str, error: EStreamError, needed_for: Need = "cpu") -> Finding:
    """A finding from an error, with the error's own next step."""
    text = str(error)
    if error.next_step:
        text = text.removesuffix(f". {error.next_step}")
    return Finding(area, name, "missing", text, needed_for, error.next_step)
