"""What goes into the machine and what came out of the file, checked: routes, banks, panels, errors of lanes."""

from __future__ import annotations

import mmap
import zlib
from collections.abc import Callable, Container, Sequence
from typing import TypeVar

import numpy as np

from estream.errors import FlashError
from estream.package.layout import PoolLayout
from estream.runtime.target import Buffer

T = TypeVar("T")

Checksum = Callable[[int, int], int]  # (layer, panel) -> CRC-32 of the panel's bytes in the package
Prepare = Callable[[memoryview], None]  # makes of a panel's bytes, uint8 [panel_bytes], what the graphs take, in place


def check_panel(memory: memoryview, layout: PoolLayout, layer: int, panel: int, checksum: Checksum) -> None:
    """Raises FlashError if `memory` (uint8 [panel_bytes]) is not what was packed. Releases the GIL while it sums."""
    expert, part = divmod(panel, layout.panels_per_expert)
    check_bytes(f"layer {layer}, expert {expert}, panel {part}", memory, checksum(layer, panel))


def check_bytes(label: str, memory: memoryview, expected: int) -> None:
    """Raises FlashError naming `label` if the CRC-32 of `memory` is not the expected one."""
    found = zlib.crc32(memory)
    if expected != found:
        raise FlashError(
            f"{label}: the bytes read are not those that were packed",
            asked=f"CRC-32 {expected:08x}",
            had=f"{found:08x}",
            next_step="Run `estream verify` to see whether the file or the reading is at fault.",
        )


def check_banks(banks: Sequence[Buffer], needs: Sequence[int]) -> list[Buffer]:
    """The banks without what they have beyond their need. Raises FlashError: their number, one too small, unaligned."""
    if len(banks) != len(needs):
        raise FlashError("homes of pinned groups must be as many for each layer", asked=len(needs), had=len(banks))
    for index, (bank, need) in enumerate(zip(banks, needs, strict=True)):
        if bank.nbytes < need:
            raise FlashError(f"bank {index} is too small", asked=f"{need} bytes", had=f"{bank.nbytes} bytes")
        if bank.address % mmap.PAGESIZE:
            raise FlashError(f"bank {index} is not page-aligned", had=hex(bank.address))
    return [bank.part(0, need) for bank, need in zip(banks, needs, strict=True)]


def check_routes(layout: PoolLayout, layer: int, needed: np.ndarray, known: Container[int]) -> np.ndarray:
    """The needed panels of `layer`, ascending. Raises FlashError unless `needed` is bool [panels_per_layer], the layer
    has experts, and its routes are not `known` yet."""
    needed = np.asarray(needed)
    if layer not in layout.moe_layers:
        raise FlashError(f"layer {layer} has no experts in the pool", had=f"layers {list(layout.moe_layers)}")
    if needed.shape != (layout.panels_per_layer,) or needed.dtype != np.bool_:
        had = f"{needed.dtype} {list(needed.shape)}"
        raise FlashError(f"routes of layer {layer}", asked=f"bool [{layout.panels_per_layer}]", had=had)
    if layer in known:
        raise FlashError(f"the routes of layer {layer} were given twice in one prefill")
    return np.flatnonzero(needed)


def attempt(action: Callable[[T], None], argument: T) -> FlashError | None:
    """In a lane: what went wrong, for the compute thread. Whatever a source raises belongs there."""
    try:
        action(argument)
    except FlashError as error:
        return error
    except BaseException as error:
        failure = FlashError(f"a lane failed: {type(error).__name__}: {error}")
        failure.__cause__ = error
        return failure
    return None
