"""Outliers in the down projection: rows that a scale per input channel would ruin, split over two channels.

A trained model has a few neurons whose down row [H] holds one entry many times larger than the rest ("super weights",
arXiv:2411.07191): scaled to that entry, the rest of the row is left with one or two steps of int8. Such a neuron
is packed as two with the same gate and up columns: one with its largest entries, one with the rest. Their sum is the
same function exactly, so only the quantised schemes split, and only into channels that a padded panel has to spare.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

OUTLIER = 8.0  # largest magnitude over root mean square of a row; normal rows of thousands of entries stay below 5
# A whole panel for them is worth its bytes when splitting outlier rows saves this share of down's squared error.
WORTHWHILE = 0.1


@dataclass(frozen=True)
class Split:
    """`channels` int64 [n]: the neurons to split, most gained first; `peaks` bool [n, H]: what moves to the new row."""

    channels: np.ndarray
    peaks: np.ndarray

    def apply(self, down: np.ndarray) -> np.ndarray:
        """down [I, H] → [I + n, H]; the new rows follow the old ones, which lose what moved."""
        moved = np.where(self.peaks, down[self.channels], np.float32(0))
        rest = down.copy()
        rest[self.channels] -= moved
        return np.concatenate([rest, moved])


def find_split(down: np.ndarray, spare: int) -> Split:
    """The at most `spare` rows of down float32 [I, H] whose split lowers the squared quantisation error the most."""
    gain, count, _ = _gains(down)
    channels = np.argsort(-gain, kind="stable")[: min(spare, len(down))]
    channels = channels[gain[channels] > 0]
    magnitudes = np.abs(down[channels])
    ranks = np.argsort(np.argsort(-magnitudes, axis=1, kind="stable"), axis=1)
    return Split(channels, ranks < count[channels, None])


def outlier_error(down: np.ndarray, spare: int) -> tuple[float, float]:
    """(squared error that splitting at most `spare` outlier rows saves, squared error without), up to one factor."""
    gain, _, before = _gains(down)
    mean_square = np.square(down, dtype=np.float64).mean(axis=1)
    outliers = np.square(np.abs(down).max(axis=1), dtype=np.float64) > OUTLIER**2 * mean_square
    return float(np.sort(gain[outliers])[::-1][:spare].sum()), float(before.sum())


def _gains(down: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Per row: error saved by its best split, how many entries move, error before. A row of n entries other than
    0 and a largest magnitude m has an error proportional to n · m²; zeros are exact."""
    rows, width = down.shape
    gain, count, before = np.empty(rows), np.empty(rows, np.int64), np.empty(rows)
    moved = np.arange(1, width, dtype=np.float64)
    for row, values in enumerate(down):
        ordered = np.sort(np.abs(values).astype(np.float64))[::-1]
        before[row] = ordered[0] ** 2 * width
        if width < 2:
            gain[row], count[row] = 0, 1
            continue
        after = ordered[1:] ** 2 * (width - moved) + ordered[0] ** 2 * moved
        best = int(after.argmin())
        gain[row], count[row] = before[row] - after[best], best + 1
    return gain, count, before
