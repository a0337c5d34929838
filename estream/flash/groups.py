"""Groups: which have a bank of their own, and how one is cut into reads for the lanes. Arithmetic only."""

from __future__ import annotations

from dataclasses import dataclass

from estream.flash.states import Load, Read
from estream.package.layout import ALIGNMENT, PoolLayout, align


@dataclass(frozen=True)
class Homes:
    """The banks of pinned groups, the first ones of every layer: after the `paging` ones, layer by layer."""

    layout: PoolLayout
    group: int  # panels
    pinned: int  # groups of every layer
    paging: int

    def bank(self, number: int) -> int | None:
        """The home of group `number` (position of its layer · groups per layer + index), None if it has none."""
        position, index = divmod(number, -(-self.layout.panels_per_layer // self.group))
        return self.paging + position * self.pinned + index if index < self.pinned else None

    @property
    def sizes(self) -> list[int]:
        """Bytes of each home."""
        firsts = range(0, self.pinned * self.group, self.group)
        panels = [min(self.group, self.layout.panels_per_layer - first) for first in firsts]
        return [count * self.layout.panel.panel_bytes for count in panels] * len(self.layout.moe_layers)


def cut(layout: PoolLayout, load: Load, lanes: int) -> None:
    """Fills `load.pending` with stripes of about equal size: at most `lanes` for contiguous panels, at least one per
    run of them."""
    panel_bytes = layout.panel.panel_bytes
    base = layout.panel_offset(load.layer, load.first)
    stripe = align(-(-len(load.read) * panel_bytes // lanes), ALIGNMENT)
    for first, count in _runs(load.read):
        start, nbytes = (first - load.first) * panel_bytes, count * panel_bytes
        piece = align(-(-nbytes // -(-nbytes // stripe)), ALIGNMENT)
        for at in range(start, start + nbytes, piece):
            load.pending.append(Read(load, at, base + at, min(piece, start + nbytes - at)))


def _runs(panels: tuple[int, ...]) -> list[tuple[int, int]]:
    """Ascending panels as (first, count) of consecutive ones."""
    runs: list[tuple[int, int]] = []
    for panel in panels:
        if runs and sum(runs[-1]) == panel:
            runs[-1] = (runs[-1][0], runs[-1][1] + 1)
        else:
            runs.append((panel, 1))
    return runs
