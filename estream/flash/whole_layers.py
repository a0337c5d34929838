"""Experts that need no reads in a prefill: the interface of ExpertStream, a layer in one group."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import numpy as np

from estream.errors import ClosedError, FlashError
from estream.flash.checks import check_routes
from estream.flash.states import Counters, ReadyGroup
from estream.package.layout import PoolLayout
from estream.runtime.target import Buffer


class WholeLayers:
    """Hands out each layer's needed panels at once. kept_bytes: held for the experts; verifies: they were compared with
    the package's checksums. The counters of a prefill stay 0."""

    def __init__(self, layout: PoolLayout, *, kept_bytes: int, verifies: bool) -> None:
        self.kept_bytes = kept_bytes
        self.verifies = verifies
        self.counters = Counters()
        self._layout = layout
        self._closed = False
        self._active = False
        self._needed: dict[int, list[int]] = {}
        self._done = 0  # layers whose groups were handed out

    def _bytes(self, layer: int, panel: int) -> Buffer:
        """Where a panel lies. Here nowhere: graphs hold the weights as constants."""
        return Buffer(0, 0)

    def begin(self, mode: str | None = None) -> None:
        """Starts a prefill; there is nothing to prefetch. Raises FlashError if one is running."""
        if self._closed:
            raise ClosedError("the experts are closed")
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
            parts = tuple((panel, self._bytes(layer, panel)) for panel in panels)
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
        """No prefill after this. Memory stays its owner's."""
        self._closed = True
        self._active = False

    def _must_run(self) -> None:
        if self._closed:
            raise ClosedError("the experts are closed")
        if not self._active:
            raise FlashError("no prefill is running", next_step="Call begin() first.")
