"""What the offline compiler says of a graph, read from its log."""

from __future__ import annotations

import re
from dataclasses import asdict, dataclass
from typing import Any

_RUN_LIST = re.compile(r"runlist = (\d+) \+ (\d+) vec(?: \+ (\d+) mtx)?")
_REFUSED = re.compile(r"Operator type: (\S+) Node name: (\S*) Node index: \d+\s+REASON : ([^\n]*)")
_ERROR = re.compile(r"\[E:[^\]]*\] ?([^\n]*)|<E> ([^\n]*)")
_VERSION = re.compile(r"Backend build version: v?(\S+)")


@dataclass(frozen=True)
class Report:
    """DDR traffic in bytes per run, operations of the run list, seconds of compiling.

    `matrix` counts apart only from v81 on; before, matrix operations are among the vector ones.
    `spill_fill_bytes`: memory that the context asks for to spill into.
    """

    read_bytes: int
    write_bytes: int
    spill_bytes: int
    fill_bytes: int
    spill_fill_bytes: int
    scalar: int
    vector: int
    matrix: int
    seconds: float

    @property
    def traffic_bytes(self) -> int:
        return self.read_bytes + self.write_bytes

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


def parse_report(log: str, seconds: float) -> Report:
    """Raises ValueError naming the figure that the log lacks: never a guess."""
    runs = _RUN_LIST.findall(log)
    if not runs:
        raise ValueError("the compiler's log has no run list")
    scalar, vector, matrix = (sum(int(run[i] or 0) for run in runs) for i in range(3))
    return Report(
        _total(log, "read_total_bytes"),
        _total(log, "write_total_bytes"),
        _total(log, "spill_bytes"),
        _total(log, "fill_bytes"),
        _spill_fill(log),
        scalar,
        vector,
        matrix,
        round(seconds, 2),
    )


def refusals(log: str) -> list[tuple[str, str, str]]:
    """(operator, node, reason) of every node that the provider would not take, without repeats."""
    return list(dict.fromkeys((m[1], m[2], m[3].strip()) for m in _REFUSED.finditer(log)))


def errors(log: str) -> list[str]:
    """The log's own error lines, without repeats, in order."""
    found = (re.sub(r"\x1b\[[0-9;]*m", "", m[1] or m[2] or "").strip() for m in _ERROR.finditer(log))
    return list(dict.fromkeys(line for line in found if line))


def qairt_version(log: str) -> str:
    """The compiler's own version, QAIRT's. Raises ValueError where the log does not give it."""
    found = _VERSION.search(log)
    if found is None:
        raise ValueError("the compiler's log has no version")
    return found[1]


def _total(log: str, name: str) -> int:
    values = re.findall(rf"\b{name}=(\d+)", log)
    if not values:
        raise ValueError(f"the compiler's log has no {name}")
    return sum(map(int, values))


def _spill_fill(log: str) -> int:
    """Printed when the context is serialised."""
    values = re.findall(r"\bspillFillBufferSizes=(\d+)", log)
    if not values:
        raise ValueError("the compiler's log has no spillFillBufferSizes")
    return max(map(int, values))
