"""Byte layout of a packed model: parts of a panel, panels of a record, records of the pool. Arithmetic only.

Run-time part: numpy and the standard library only. Units are bytes throughout.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

ALIGNMENT = 16384  # of records, panels and dense tensors in their files: any page size, any direct-I/O block
PART_ALIGNMENT = 128  # of a part inside its panel: what the NPU and its DMA like
PANEL_GRANULE = 32  # panel widths are multiples of this: an NPU tile, an int4 group

Scheme = Literal["f32", "f16", "int8"]
SCHEMES: tuple[str, ...] = get_args(Scheme)

# safetensors names of the dtypes that a package holds
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
}
WEIGHT_DTYPE: dict[str, str] = {"f32": "F32", "f16": "F16", "int8": "I8"}


def align(nbytes: int, to: int = ALIGNMENT) -> int:
    """`nbytes` rounded up to a multiple of `to`."""
    return -(-nbytes // to) * to


@dataclass(frozen=True)
class Part:
    """One tensor inside a panel; its name is the expert graph's input name."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    offset: int

    @property
    def nbytes(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64)) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PanelLayout:
    """A shape class: panels with the same (hidden, width, scheme) have the same bytes and run through one graph.

    Parts, in order: gate [H, Ip], up [H, Ip], down [Ip, H]; for int8 also gate_scale [Ip] and mid_scale [Ip] float32.
    int8 is symmetric: gate and up have one scale per output channel, down one per *input* channel, so that
    mid_scale = up_scale · down_scale acts on the intermediate and y needs nothing after the last product:
        y = quantised((silu(x·gate · gate_scale) · (x·up) · mid_scale) · router_gate) · down
    """

    hidden: int
    width: int
    scheme: str

    @property
    def parts(self) -> tuple[Part, ...]:
        h, w, weight = self.hidden, self.width, WEIGHT_DTYPE[self.scheme]
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            ("gate", weight, (h, w)),
            ("up", weight, (h, w)),
            ("down", weight, (w, h)),
        ]
        if self.scheme == "int8":
            wanted += [("gate_scale", "F32", (w,)), ("mid_scale", "F32", (w,))]
        parts: list[Part] = []
        offset = 0
        for name, dtype, shape in wanted:
            part = Part(name, dtype, shape, offset)
            parts.append(part)
            offset = align(offset + part.nbytes, PART_ALIGNMENT)
        return tuple(parts)

    @property
    def panel_bytes(self) -> int:
        """Bytes of one panel, padded to ALIGNMENT."""
        last = self.parts[-1]
        return align(last.offset + last.nbytes)

    def panels(self, intermediate: int) -> int:
        """Panels of an expert of this intermediate size; the last one is padded with zero channels."""
        return -(-intermediate // self.width)

    def record_bytes(self, intermediate: int) -> int:
        return self.panels(intermediate) * self.panel_bytes


@dataclass(frozen=True)
class PoolLayout:
    """Where each record lies in experts.safetensors: layers in order, experts in order, no gaps."""

    panel: PanelLayout
    panels_per_expert: int
    experts: int
    moe_layers: tuple[int, ...]
    data_offset: int = ALIGNMENT  # where the file's data starts, after its padded header

    @property
    def record_bytes(self) -> int:
        return self.panels_per_expert * self.panel.panel_bytes

    @property
    def panels_per_layer(self) -> int:
        return self.experts * self.panels_per_expert

    @property
    def layer_bytes(self) -> int:
        return self.experts * self.record_bytes

    @property
    def pool_bytes(self) -> int:
        """Bytes of all records, without the header."""
        return len(self.moe_layers) * self.layer_bytes

    def panel_offset(self, layer: int, panel: int) -> int:
        """File offset of panel number `panel` (expert · panels_per_expert + p) of model layer `layer`."""
        position = self.moe_layers.index(layer)
        return self.data_offset + position * self.layer_bytes + panel * self.panel.panel_bytes


# Largest hidden × width of a panel: what the NPU's on-chip memory holds at 128 rows without spilling.
_PANEL_ELEMENTS = {"f32": 1 << 21, "f16": 1 << 21, "int8": 1 << 22}


def default_panel_width(hidden: int, intermediate: int, scheme: str) -> int:
    """The widest equal split of an expert that the scheme's on-chip budget allows, in multiples of PANEL_GRANULE."""
    limit = max(PANEL_GRANULE, _PANEL_ELEMENTS[scheme] // hidden // PANEL_GRANULE * PANEL_GRANULE)
    panels = -(-intermediate // limit)
    return align(-(-intermediate // panels), PANEL_GRANULE)


def head_slices(vocab: int, limit: int = 8192) -> tuple[int, int]:
    """(slices, width) of the head: equal widths, multiples of 32, at most `limit`; the last is padded with zeros."""
    slices = -(-vocab // limit)
    return slices, align(-(-vocab // slices), 32)
