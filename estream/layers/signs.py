"""int8 weights as two's complement: what targets with signed graphs make of the packages' integers + 128, in memory."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from estream.package.layout import PanelLayout
from estream.runtime.target import Target

_SIGNS = np.uint64(0x8080808080808080)


def flip_signs(memory: memoryview) -> None:
    """Flips every byte's top bit where it lies: integer + 128 becomes the integer, and back.

    `memory`: uint8, of a multiple of 8 bytes. Releases the GIL.
    """
    words = np.frombuffer(memory, np.uint64)
    np.bitwise_xor(words, _SIGNS, out=words)


def panel_preparation(target: Target, panel: PanelLayout) -> Callable[[memoryview], None] | None:
    """What to do once with each panel (uint8 [panel_bytes]) that was read into the target's memory; None: nothing."""
    if panel.scheme != "int8" or not target.signed:
        return None
    end = panel.matrix_bytes
    return lambda memory: flip_signs(memory[:end])
