"""Byte layout of a packed model: parts of a panel, panels of a record, records of the pool. Arithmetic only.

Run-time part: numpy and the standard library only. Units are bytes throughout.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Literal, get_args

import numpy as np

from estream.package.chunks import CHUNK_ELEMENTS, chunk_names, panel_chunks

ALIGNMENT = 16384  # of records, panels and dense tensors in their files: any page size, any direct-I/O block
PART_ALIGNMENT = 128  # of a part inside its panel: what the NPU and its DMA like
PANEL_GRANULE = 32  # panel widths are multiples of this: an NPU tile
INT4_GROUP = 32  # rows of an int4 matrix that share a multiplier
ZERO_POINT = 128  # the byte that stands for 0 in an int8 matrix
STEP = 2.0**-7  # weight = integer · STEP · magnitude of its channel

Scheme = Literal["f32", "f16", "int8", "int4"]
SCHEMES: tuple[str, ...] = get_args(Scheme)  # of experts
DENSE_SCHEMES: tuple[str, ...] = ("f32", "f16", "int8")  # of attention and head
INTEGER_SCHEMES = frozenset({"int8", "int4"})  # 8-bit products of quantised rows on target cpu
# Graph sets of target cpu with 8-bit products: uint8 rows × int8 weights, or × uint8 (`runtime/processor.py`)
INTEGER_GRAPHS = frozenset({"cpu", "cpu-u8"})

# safetensors names of the dtypes that a package holds
DTYPES: dict[str, np.dtype] = {
    "F32": np.dtype(np.float32),
    "F16": np.dtype(np.float16),
    "I8": np.dtype(np.int8),
    "U8": np.dtype(np.uint8),
    "I32": np.dtype(np.int32),
}
WEIGHT_DTYPE: dict[str, str] = {"f32": "F32", "f16": "F16", "int8": "U8", "int4": "U8"}


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
        return math.prod(self.shape) * DTYPES[self.dtype].itemsize


@dataclass(frozen=True)
class PanelLayout:
    """A shape class: panels with the same (hidden, width, scheme) have the same bytes and run through one graph.

    Parts, in order: gate [H, Ip], up [H, Ip], down [Ip, H], each in `chunks` column chunks `gate.0` [H, Ip/C],
    `gate.1` … (plain `gate` where there is one); for int8 and int4 also gate_scale [Ip] and mid_scale [Ip] float16,
    magnitudes: weight = integer / 128 · magnitude. gate and up have one per output channel, down one per *input*
    channel, so that mid_scale, up's times down's, acts on the intermediate and y needs nothing after the last product:
        y = quantised((silu(x·gate · gate_scale) · (x·up) · mid_scale) · router_gate) · down

    biased (`Clamped`): up_scale and down_scale in the place of mid_scale, because up is clamped before it meets down,
    and gate_bias, up_bias [Ip], down_bias [H], float16 (f32: float32). A record has its down_bias in its first panel.

    int8: byte = integer + 128, 1 … 255, which is what the NPU multiplies at full speed. A target that takes two's
    complement flips the top bits of the first `matrix_bytes` in memory.

    int4 is the same with 8-bit integers made of nibbles: integer = (nibble - 8) · multiplier, nibbles 1 … 15, one
    multiplier 1 … 18 per column and group of 32 rows. So unpacking is exact and stays within 8 bits on every target. A
    chunk [K, N] is stored as U8 [K/2, N] (low nibbles are rows 0 … K/2 - 1, high nibbles the rest) and its multipliers
    as U8 [K/32, N] (`gate_multiplier.0`): 4.25 bits per weight. Each half holds whole groups: H and Ip are multiples of
    64 (`panel_granule`).
    """

    hidden: int
    width: int
    scheme: str
    biased: bool = False

    @property
    def chunks(self) -> int:
        """Column chunks of each matrix."""
        return panel_chunks(self.hidden, self.width, self.scheme)

    @property
    def matrix_bytes(self) -> int:
        """Where the matrices end: the offset of what follows them, or the end of the last one."""
        last = self.parts[3 * self.chunks - 1]
        return align(last.offset + last.nbytes, PART_ALIGNMENT)

    @cached_property
    def parts(self) -> tuple[Part, ...]:
        matrices = {
            "gate": (self.hidden, self.width),
            "up": (self.hidden, self.width),
            "down": (self.width, self.hidden),
        }
        packed = 2 if self.scheme == "int4" else 1  # rows per stored row
        wanted: list[tuple[str, str, tuple[int, ...]]] = [
            (key, WEIGHT_DTYPE[self.scheme], (k // packed, n // self.chunks))
            for name, (k, n) in matrices.items()
            for key in chunk_names(name, self.chunks)
        ]
        if self.scheme in INTEGER_SCHEMES:
            scales = ("gate_scale", "up_scale", "down_scale") if self.biased else ("gate_scale", "mid_scale")
            wanted += [(name, "F16", (self.width,)) for name in scales]
        if self.biased:
            dtype = "F32" if self.scheme == "f32" else "F16"
            sizes = {"gate_bias": self.width, "up_bias": self.width, "down_bias": self.hidden}
            wanted += [(name, dtype, (size,)) for name, size in sizes.items()]
        if self.scheme == "int4":
            wanted += [
                (key, "U8", (k // INT4_GROUP, n // self.chunks))
                for name, (k, n) in matrices.items()
                for key in chunk_names(f"{name}_multiplier", self.chunks)
            ]
        parts: list[Part] = []
        offset = 0
        for name, dtype, shape in wanted:
            part = Part(name, dtype, shape, offset)
            parts.append(part)
            offset = align(offset + part.nbytes, PART_ALIGNMENT)
        return tuple(parts)

    @cached_property  # asked for at every read
    def panel_bytes(self) -> int:
        """Bytes of one panel, padded to ALIGNMENT."""
        last = self.parts[-1]
        return align(last.offset + last.nbytes)

    def panels(self, intermediate: int) -> int:
        """Panels of an expert of this intermediate size; the last one is padded with zero channels."""
        return -(-intermediate // self.width)

    def record_bytes(self, intermediate: int, spare: int = 0) -> int:
        """Bytes of a record; `spare`: panels beyond those that its channels fill."""
        return (self.panels(intermediate) + spare) * self.panel_bytes


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


# Column chunks, not panels, are what the NPU's on-chip memory limits; these sizes were found spill-free at 256 rows.
_WIDEST_PANEL = 2048
_PANEL_ELEMENTS = 1 << 23  # hidden × width
_INT4_ELEMENTS = 1 << 22  # beyond, unpacking's run list and the time to compile explode
_SPLIT_GRANULE = 128  # of panels that are a part of an expert
_CHUNK_THAT_FITS = 11 * CHUNK_ELEMENTS // 8  # found spill-free; 1.4 times CHUNK_ELEMENTS was not


def panel_granule(scheme: str) -> int:
    """What panel widths are multiples of; for int4 the hidden size too."""
    return 2 * INT4_GROUP if scheme == "int4" else PANEL_GRANULE


def holds(hidden: int, scheme: str) -> bool:
    """Whether panels of this hidden size exist in the scheme: int4 groups must divide each half of its rows."""
    return scheme != "int4" or hidden % panel_granule(scheme) == 0


def default_dense(experts: str) -> str:
    """The scheme of attention and head that goes with a scheme of experts."""
    return experts if experts in DENSE_SCHEMES else "int8"


def default_panel_width(hidden: int, intermediate: int, scheme: str) -> int:
    """The widest equal split of an expert that the NPU takes well: the whole expert where it can be."""
    granule = panel_granule(scheme)
    limit = min(_WIDEST_PANEL, (_INT4_ELEMENTS if scheme == "int4" else _PANEL_ELEMENTS) // hidden)
    if intermediate <= limit:
        return align(intermediate, granule)
    step = _SPLIT_GRANULE if limit >= _SPLIT_GRANULE else granule
    limit = max(step, limit // step * step)
    fewest = -(-intermediate // limit)
    widths = [align(-(-intermediate // panels), step) for panels in range(fewest, 2 * fewest + 1)]
    if scheme == "f32":  # not for the NPU
        return widths[0]
    small = (w for w in widths if hidden * w // panel_chunks(hidden, w, scheme) <= _CHUNK_THAT_FITS)
    return next(small, widths[0])


def head_slices(vocab: int, limit: int = 8192) -> tuple[int, int]:
    """(slices, width) of the head: equal widths, multiples of 32, about `limit` at most; the last is padded with zeros.

    A width may be up to a twentieth wider, where that lets it divide into 16 to 64 column chunks of whole NPU tiles.
    """
    slices = -(-vocab // limit)
    least = align(-(-vocab // slices), 32)
    divisible = (w for w in range(least, least + least // 20 + 1, 32) if any(w // 32 % n == 0 for n in range(16, 65)))
    return slices, next(divisible, least)
