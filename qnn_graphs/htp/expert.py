"""Expert panels over the slots of one dispatch. Routed, shared and dense FFNs alike.

A slot is a tile of `rows` token rows and the address of one panel; every slot has its own weights, and nothing is
shared between slots but the program. Matrices are stored in column chunks (gate and up [H, Ip/C], down [Ip, H/C], each
contiguous): the compiler then streams them through on-chip memory instead of spilling, and returns y chunk by chunk.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import onnx

from estream.models.base import Clamped
from estream.package.chunks import chunk_names
from qnn_graphs.builder import Builder
from qnn_graphs.htp.quantised import PRODUCT, TILE, half, integer_product, join_columns, quantise_rows
from qnn_graphs.htp.weights import GROUP, column_vectors, weight_operand


@dataclass(frozen=True)
class ExpertGraph:
    """What fixes an expert graph: `slots` tiles of `rows` rows, panels [hidden, width] in `chunks` column chunks."""

    hidden: int
    width: int
    scheme: str
    slots: int
    rows: int
    chunks: int = 1
    tile: str = "f16"  # tile format: f16, or u16 with row magnitudes (int8 and int4 on the integer matrix path)
    signed: bool = False  # int8 only: weights are I8, not U8
    clamped: Clamped | None = None  # f16 tiles only

    def __post_init__(self) -> None:
        if self.tile not in ("f16", "u16") or (self.tile == "u16" and self.scheme == "f16"):
            raise ValueError(f"no {self.tile} tiles for {self.scheme} weights")
        if self.tile == "u16" and self.clamped is not None:
            raise ValueError("no u16 tiles for clamped experts")
        for name, size in (("hidden", self.hidden), ("width", self.width)):
            if size % self.chunks:
                raise ValueError(f"{name} {size} does not divide into {self.chunks} column chunks")

    @property
    def name(self) -> str:
        return f"expert.{self.slots}x{self.rows}"

    @property
    def weight_bytes(self) -> int:
        """Bytes of one panel's matrices and scales."""
        elements = 3 * self.hidden * self.width
        if self.scheme == "f16":
            return 2 * elements
        matrices = elements if self.scheme == "int8" else elements // 2 + elements // GROUP
        return matrices + 2 * 2 * self.width

    @property
    def tile_bytes(self) -> int:
        """Bytes of one slot's x and y, magnitudes and gates."""
        vectors = 1 if self.tile == "f16" else 3
        return self.rows * (4 * self.hidden + 2 * vectors)

    @property
    def ideal_bytes(self) -> int:
        """DDR traffic of a dispatch that reads every panel once and every tile in and out once."""
        return self.slots * (self.weight_bytes + self.tile_bytes)


def build_expert(spec: ExpertGraph) -> onnx.ModelProto:
    """Per slot s, prefix `slot{s}.`: x [T, H], gates [T, 1], the panel's parts → y [T, H] (or `y.{c}` [T, H/C]).

    Tiles f16: x and y are float16. Tiles u16: integers (`estream.runtime.tiles`; y's unit is PRODUCT_UNIT) with their
    rows' magnitudes x_scale and y_scale float16 [T, 1]. Parts: gate, up, down as `qnn_graphs.htp.weights` says; for
    int8 and int4 gate_scale and mid_scale float16 [1, Ip/C] per chunk: magnitudes of gate's columns, and of up's
    columns times down's rows.
    """
    b = Builder(spec.name)
    for slot in range(spec.slots):
        prefix = f"slot{slot}."
        if spec.clamped is not None:
            _clamped_slot(b, spec, prefix, spec.clamped)
        else:
            (_float_slot if spec.tile == "f16" else _integer_slot)(b, spec, prefix)
    return b.model()


def _integer_slot(b: Builder, spec: ExpertGraph, prefix: str) -> None:
    """Factors of a row that commute (x's magnitude in up, the gate) go to y's magnitude: [T, 1] instead of [T, Ip]."""
    x = TILE.read(b, b.input(f"{prefix}x", (spec.rows, spec.hidden), np.uint16))
    magnitude, gates = (b.input(f"{prefix}{name}", (spec.rows, 1), np.float16) for name in ("x_scale", "gates"))
    gate_scales, mid_scales = _scales(b, spec, prefix)
    middle = []
    for chunk, (gate, up) in enumerate(
        zip(*(_matrices(b, spec, prefix, part) for part in ("gate", "up")), strict=True)
    ):
        raw = b.node("Mul", _product(b, x, gate), magnitude)
        g = b.node("Mul", raw, gate_scales[chunk])
        u = b.node("Mul", _product(b, x, up), mid_scales[chunk])
        middle.append(b.node("Mul", silu(b, g), u))
    pieces, largest = quantise_rows(b, *middle)
    rows = join_columns(b, TILE, pieces)
    b.node(
        "Mul", b.node("Mul", largest, gates), magnitude, out=b.output(f"{prefix}y_scale", (spec.rows, 1), np.float16)
    )
    for name, down in zip(chunk_names("y", spec.chunks), _matrices(b, spec, prefix, "down"), strict=True):
        integer_product(b, rows, down, out=_declare_y(b, spec, prefix + name, np.uint16))


def _float_slot(b: Builder, spec: ExpertGraph, prefix: str) -> None:
    x = b.input(f"{prefix}x", (spec.rows, spec.hidden), np.float16)
    gates = b.input(f"{prefix}gates", (spec.rows, 1), np.float16)
    scales = None if spec.scheme == "f16" else _scales(b, spec, prefix)
    middle = []
    for chunk, (gate, up) in enumerate(
        zip(*(_matrices(b, spec, prefix, part) for part in ("gate", "up")), strict=True)
    ):
        g, u = b.node("MatMul", x, gate), b.node("MatMul", x, up)
        if scales is not None:
            g, u = b.node("Mul", g, scales[0][chunk]), b.node("Mul", u, scales[1][chunk])
        middle.append(b.node("Mul", b.node("Mul", silu(b, g), u), gates))
    rows = middle[0] if len(middle) == 1 else b.node("Concat", *middle, axis=1)
    for name, down in zip(chunk_names("y", spec.chunks), _matrices(b, spec, prefix, "down"), strict=True):
        b.node("MatMul", rows, down, out=_declare_y(b, spec, prefix + name, np.float16))


def _clamped_slot(b: Builder, spec: ExpertGraph, prefix: str, form: Clamped) -> None:
    """`Clamped`, biases and scales where they arise. A gate multiplies the intermediate, and down's bias."""
    x = b.input(f"{prefix}x", (spec.rows, spec.hidden), np.float16)
    gates = b.input(f"{prefix}gates", (spec.rows, 1), np.float16)

    def vectors(name: str, size: int) -> list[str]:
        return column_vectors(b, prefix + name, size, spec.chunks)

    def biased(part: str) -> list[str]:
        results = [b.node("MatMul", x, matrix) for matrix in _matrices(b, spec, prefix, part)]
        if spec.scheme != "f16":
            scales = vectors(f"{part}_scale", spec.width)
            results = [b.node("Mul", result, scale) for result, scale in zip(results, scales, strict=True)]
        biases = vectors(f"{part}_bias", spec.width)
        return [b.node("Add", result, bias) for result, bias in zip(results, biases, strict=True)]

    middle = []
    for g, u in zip(biased("gate"), biased("up"), strict=True):
        g = b.node("Min", g, half(b, form.limit))
        u = b.node("Add", b.node("Clip", u, half(b, -form.limit), half(b, form.limit)), half(b, 1.0))
        gated = b.node("Mul", g, b.node("Sigmoid", b.node("Mul", g, half(b, form.alpha))))
        middle.append(b.node("Mul", b.node("Mul", gated, u), gates))
    if spec.scheme != "f16":
        scales = vectors("down_scale", spec.width)
        middle = [b.node("Mul", one, scale) for one, scale in zip(middle, scales, strict=True)]
    rows = middle[0] if len(middle) == 1 else b.node("Concat", *middle, axis=1)
    names = chunk_names("y", spec.chunks)
    for name, down, bias in zip(
        names, _matrices(b, spec, prefix, "down"), vectors("down_bias", spec.hidden), strict=True
    ):
        added = b.node("Mul", gates, bias)
        b.node("Add", b.node("MatMul", rows, down), added, out=_declare_y(b, spec, prefix + name, np.float16))


def _scales(b: Builder, spec: ExpertGraph, prefix: str) -> tuple[list[str], list[str]]:
    """gate_scale and mid_scale, each in column chunks [1, Ip/C]."""
    gate, mid = (column_vectors(b, prefix + name, spec.width, spec.chunks) for name in ("gate_scale", "mid_scale"))
    return gate, mid


def _product(b: Builder, x: str, weight: str) -> str:
    return PRODUCT.read(b, integer_product(b, x, weight))


def _matrices(b: Builder, spec: ExpertGraph, prefix: str, part: str) -> list[str]:
    """Operands of a matrix's chunks."""
    rows, columns = (spec.width, spec.hidden) if part == "down" else (spec.hidden, spec.width)
    shape = (rows, columns // spec.chunks)
    return [
        weight_operand(b, prefix + name, shape, spec.scheme, signed=spec.signed)
        for name in chunk_names(part, spec.chunks)
    ]


def _declare_y(b: Builder, spec: ExpertGraph, name: str, dtype: type[np.generic]) -> str:
    return b.output(name, (spec.rows, spec.hidden // spec.chunks), dtype)


def silu(b: Builder, x: str) -> str:
    """x · sigmoid(x): the compiler fuses the two."""
    return b.node("Mul", x, b.node("Sigmoid", x))
