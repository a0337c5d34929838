"""All records in memory: the same interface as ExpertStream, without reads during a prefill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate

from estream.errors import FlashError
from estream.flash.checks import Checksum, Prepare, check_panel
from estream.flash.pool import Source
from estream.flash.ranges import Progress, load_ranges
from estream.flash.whole_layers import WholeLayers
from estream.package.layout import PoolLayout
from estream.runtime.target import Buffer


class ResidentExperts(WholeLayers):
    """Reads the whole pool into `buffers` (page-aligned, whole records each, pool_bytes together) when built; a layer
    is one group.

    checksum: (layer, panel) -> CRC-32, to verify every panel once, or None. prepare: called once with the bytes of
    every panel, after that. progress: (stage, done, total) in bytes.
    `loaded_bytes` counts what was read at open; the counters of a prefill stay 0. Raises FlashError.
    """

    def __init__(
        self,
        source: Source,
        layout: PoolLayout,
        buffers: Sequence[Buffer],
        *,
        lanes: int = 2,
        checksum: Checksum | None = None,
        prepare: Prepare | None = None,
        progress: Progress | None = None,
    ) -> None:
        sizes = [buffer.nbytes for buffer in buffers]
        if sum(sizes) != layout.pool_bytes or any(size % layout.record_bytes for size in sizes):
            had = f"{sum(sizes)} bytes in {len(sizes)} buffers"
            raise FlashError("the buffers do not hold all records", asked=f"{layout.pool_bytes} bytes", had=had)
        super().__init__(layout, kept_bytes=layout.pool_bytes, verifies=checksum is not None)
        self._size = layout.panel.panel_bytes
        self._buffers = list(buffers)
        self._starts = [0, *accumulate(sizes)][:-1]  # bytes of the pool before each buffer
        self.loaded_bytes = load_ranges(
            source,
            [(buffer, layout.data_offset + at) for buffer, at in zip(buffers, self._starts, strict=True)],
            lanes=lanes,
            progress=progress,
            stage="loading experts",
        )
        if checksum is not None:
            self._verify(checksum, progress)
        if prepare is not None:
            for at in range(0, layout.pool_bytes, self._size):
                prepare(self._panel(at).memory())

    def _verify(self, checksum: Checksum, progress: Progress | None) -> None:
        for layer in self._layout.moe_layers:
            for panel in range(self._layout.panels_per_layer):
                at = self._offset(layer, panel)
                check_panel(self._panel(at).memory(), self._layout, layer, panel, checksum)
            if progress is not None:
                progress("verifying experts", at + self._size, self._layout.pool_bytes)

    def _offset(self, layer: int, panel: int) -> int:
        return self._layout.panel_offset(layer, panel) - self._layout.data_offset

    def _panel(self, at: int) -> Buffer:
        """The panel that starts at byte `at` of the pool."""
        buffer = bisect_right(self._starts, at) - 1
        return self._buffers[buffer].part(at - self._starts[buffer], self._size)

    def _bytes(self, layer: int, panel: int) -> Buffer:
        return self._panel(self._offset(layer, panel))
