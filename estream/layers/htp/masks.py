"""Which keys a query sees: masks of the attention core, by the distance of the two blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import numpy as np

from estream.runtime.target import Buffer

MASKED = -30000.0  # added to a score that does not count; also the running maximum before the first block


class Masks:
    """One buffer per mask that occurs: float16 [T, T], 0 or MASKED. None of them depends on the prompt."""

    def __init__(self, allocate: Callable[[str, int], Buffer], rows: int, windows: Iterable[int | None]) -> None:
        self._rows = rows
        self._allocate = allocate
        self.nothing = self._make("nothing", np.zeros((rows, rows), bool))
        self._everything = self._make("everything", np.ones((rows, rows), bool))
        self._partial = {
            (window, distance): self._make(f"{window} at {distance}", seen)
            for window in windows
            for distance in self._cut(window)
            if not (seen := self._seen(window, distance)).all()
        }

    def of(self, window: int | None, distance: int) -> Buffer:
        """The mask of a query block against the key block `distance` blocks before it."""
        return self._partial.get((window, distance), self._everything)

    def first(self, window: int | None, block: int) -> int:
        """The first key block that any query of `block` sees."""
        return first_block(window, block, self._rows)

    def _cut(self, window: int | None) -> range:
        """Distances at which a mask may be neither everything nor nothing."""
        return range(1 if window is None else (window + self._rows - 2) // self._rows + 1)

    def _seen(self, window: int | None, distance: int) -> np.ndarray:
        step = np.arange(self._rows)
        back = distance * self._rows + step[:, None] - step[None, :]
        seen: np.ndarray = (back >= 0) & (back < (window if window is not None else np.inf))
        return seen

    def _make(self, label: str, seen: np.ndarray) -> Buffer:
        buffer = self._allocate(f"mask {label}", 2 * seen.size)
        buffer.array(np.float16, seen.shape)[...] = np.where(seen, 0, MASKED)
        return buffer


def first_block(window: int | None, block: int, rows: int) -> int:
    """The first key block that any query of `block` sees, in blocks of `rows`."""
    return 0 if window is None else max(0, block * rows - window + 1) // rows
