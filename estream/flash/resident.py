"""All records in memory: the same interface as ExpertStream, without reads during a prefill."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate

import numpy as np

from estream.errors import ClosedError, FlashError
from estream.flash.checks import Checksum, Prepare, check_panel, check_routes
from estream.flash.pool import Source
from estream.flash.ranges import Progress, load_ranges
from estream.flash.states import Counters, ReadyGroup
from estream.package.layout import PoolLayout
from estream.runtime.target import Buffer


class ResidentExperts:
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
        self._layout = layout
        self._size = layout.panel.panel_bytes
        self._buffers = list(buffers)
        self._starts = [0, *accumulate(sizes)][:-1]  # bytes of the pool before each buffer
        self.kept_bytes = layout.pool_bytes
        self.verifies = checksum is not None
        self.counters = Counters()
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
        self._closed = False
        self._active = False
        self._needed: dict[int, list[int]] = {}
        self._done = 0  # layers whose groups were handed out

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

    def begin(self, mode: str | None = None) -> None:
        """Starts a prefill; there is nothing to prefetch. Raises FlashError if one is running."""
        if self._closed:
            raise ClosedError("the resident experts are closed")
        if self._active:
            raise FlashError("a prefill is already running", next_step="End or abort it first.")
        self.counters = Counters()
        self._needed = {}
        self._done = 0
        self._active = True

    def routes(self, layer: int, needed: np.ndarray) -> None:
        """Which panels of `layer` have tokens: bool [panels_per_layer]. Raises FlashError as ExpertStream does."""
        self._must_run()
        panels = check_routes(self._layout, layer, needed, self._needed)
        self._needed[layer] = [int(panel) for panel in panels]
        self.counters.panels_needed += len(panels)

    def groups(self, layer: int, starved: Callable[[], None] | None = None) -> Iterator[ReadyGroup]:
        """One group with the layer's needed panels, none if there are none; to release it does nothing, and `starved`
        is never called. Raises FlashError out of order."""
        self._must_run()
        if self._done == len(self._layout.moe_layers) or self._layout.moe_layers[self._done] != layer:
            raise FlashError("groups are computed in pool order", asked=f"layer {layer}")
        if layer not in self._needed:
            raise FlashError(f"the routes of layer {layer} are not known", next_step="Call routes() before groups().")
        self._done += 1
        panels = self._needed[layer]
        if panels:
            parts = tuple((panel, self._panel(self._offset(layer, panel))) for panel in panels)
            yield ReadyGroup(layer, 0, 0, parts, lambda: None)

    def end(self) -> None:
        """The prefill is complete. Raises FlashError if layers are left."""
        self._must_run()
        if self._done < len(self._layout.moe_layers):
            layer = self._layout.moe_layers[self._done]
            raise FlashError(f"the prefill ends before layer {layer} is done", next_step="Abort it instead.")
        self._active = False

    def abort(self) -> None:
        """Gives the prefill up from any state."""
        self._active = False

    def close(self) -> None:
        """No prefill after this. The buffers stay their owner's."""
        self._closed = True
        self._active = False

    def _must_run(self) -> None:
        if self._closed:
            raise ClosedError("the resident experts are closed")
        if not self._active:
            raise FlashError("no prefill is running", next_step="Call begin() first.")
