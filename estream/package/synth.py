"""`synth`: a packed model of seeded random weights in the shape of a public model, written without a checkpoint."""

from __future__ import annotations

import os
import zlib
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np

from estream.errors import UsageError
from estream.models import family as find_family
from estream.package.dense import DenseTensor, linear_name, linears
from estream.package.files import Progress
from estream.package.layout import DTYPES, INT4_GROUP, INTEGER_SCHEMES, STEP, ZERO_POINT, Part
from estream.package.presets import preset_config
from estream.package.quantise import part_views
from estream.package.writer import Packing, PackResult, check_schemes, write_package

_PIECE_ELEMENTS = 1 << 22  # drawn at a time

# The recipe, for a residual stream that starts at unit variance and stays below about 2. After a norm, x has unit
# variance; a matrix [K, N] of variance v/K gives outputs of variance v.
_LOGITS = 2.0  # of the head: standard deviation of the logits
_ROUTER = 1.0  # standard deviation of router logits: the top 8 of 64 then differ by factors, and every expert is used
_SWIGLU = 0.355  # mean square of silu(a)·b for independent unit normals a and b, which down must make up for
_NORM_SPREAD = 0.1  # norm weights are 1 ± this, biases 0 ± this: wrong ones must change the answer


def synthesize(
    preset: str,
    out: str | os.PathLike[str],
    *,
    experts: str = "int8",
    dense: str | None = None,
    layers: int | None = None,
    seed: int = 0,
    force: bool = False,
    progress: Progress | None = None,
) -> PackResult:
    """Writes a packed model with random weights in the shape of `preset`, cut to its first `layers` layers if given.

    The same arguments give the same bytes; every record differs. Activations stay finite and routing is spread over
    all experts. There is no tokenizer. Memory is bounded by a few panels.

    Raises:
        UsageError: unknown preset or scheme, impossible `layers`, or `out` exists.
        PackageError: not enough space.
    """
    check_schemes(experts, dense)
    source = {"kind": "synth", "preset": preset, "seed": seed}
    config = preset_config(preset, layers)
    if layers is not None:
        whole = preset_config(preset)
        architecture = find_family(whole["model_type"]).from_config(whole).architecture()
        least = architecture.moe_layers[0] + 1
        if layers < least:
            had = f"{least} to {len(architecture.layers)}: the first layer with experts is number {least}"
            raise UsageError(f"--layers of {preset}", asked=layers, had=had)
    return _synthesize(config, source, out, experts, dense, seed, force, progress)


def synthesize_small(out: str | os.PathLike[str]) -> PackResult:
    """One layer of 16 experts in OLMoE's sizes with a small vocabulary, 100 MiB: enough to measure a machine with."""
    config = preset_config("olmoe-1b-7b", 1) | {"num_experts": 16, "vocab_size": 8192}
    source = {"kind": "synth", "preset": "small", "seed": 0}
    return _synthesize(config, source, out, "int8", None, 0, True, None)


def _synthesize(
    config: dict[str, Any],
    source: dict[str, Any],
    out: str | os.PathLike[str],
    experts: str,
    dense: str | None,
    seed: int,
    force: bool,
    progress: Progress | None,
) -> PackResult:
    family = find_family(config["model_type"]).from_config(config)
    packing = Packing(family, experts, dense, None, source)
    return write_package(Path(out), packing, RandomWeights(packing, seed), copies={}, force=force, progress=progress)


class RandomWeights:
    """Packed weights drawn directly in their stored form, each tensor or panel from a generator of its own."""

    def __init__(self, packing: Packing, seed: int) -> None:
        self._packing, self._seed = packing, seed
        self._branch = (2 * len(packing.architecture.layers)) ** -0.5  # two branches per layer add to the residual

    def experts(self) -> Iterator[np.ndarray]:
        """Every panel of the pool in order, U8 [panel_bytes]."""
        arch, panels = self._packing.architecture, self._packing.pool.panels_per_expert
        for layer in arch.moe_layers:
            for expert in range(arch.experts):
                for panel in range(panels):
                    yield self._panel(f"layers.{layer}.experts.{expert}", panel, arch.expert_intermediate)

    def dense(self) -> Iterator[tuple[str, np.ndarray]]:
        """(tensor name, piece) in file order."""
        arch = self._packing.architecture
        for tensor in self._packing.dense_tensors:
            if tensor.panels:
                shared = tensor.name.endswith(".shared")
                for panel in range(tensor.panels):
                    intermediate = arch.shared_intermediate if shared else arch.dense_intermediate
                    yield tensor.name, self._panel(tensor.name, panel, intermediate)
            elif tensor.name.endswith(".scale"):
                deviation = self._deviation(tensor.name, self._inputs(tensor.name))
                yield tensor.name, np.full(tensor.shape, deviation / _INT8_DEVIATION / STEP, np.float16)
            else:
                for piece in self._tensor(tensor):
                    yield tensor.name, piece

    def _inputs(self, name: str) -> int:
        """K of the matrix that `name` is, or scales."""
        arch = self._packing.architecture
        matrix = (linear_name(name) or name).rpartition(".")[2]
        return linears(arch.attention, arch.hidden).get(matrix, (arch.hidden, 0))[0]

    def _deviation(self, name: str, inputs: int) -> float:
        name = linear_name(name) or name
        kind = name.split(".")[0 if name.startswith(("embed", "head")) else -1]
        scale = {"embed": inputs**0.5, "head": _LOGITS, "router": _ROUTER, "o": self._branch}.get(kind, 1.0)
        return float(scale * inputs**-0.5)

    def _tensor(self, tensor: DenseTensor) -> Iterator[np.ndarray]:
        """Pieces of whole rows."""
        draw = self._generator(tensor.name, 0)
        dtype = DTYPES[tensor.dtype]
        if len(tensor.shape) == 1:
            centre = 0.0 if tensor.name.endswith("bias") else 1.0
            yield centre + _floats(draw, tensor.shape, _NORM_SPREAD, dtype)
            return
        rows, columns = tensor.shape
        used = columns
        if tensor.name.startswith("head."):  # columns beyond the vocabulary are zeros, as pack writes them
            index, chunk = (int(number) for number in (*tensor.name.split(".")[1:], "0")[:2])
            start = index * self._packing.head_width + chunk * columns
            used = min(max(self._packing.architecture.vocab - start, 0), columns)
        deviation = self._deviation(tensor.name, columns if tensor.name == "embed" else rows)
        step = max(1, _PIECE_ELEMENTS // columns)
        for start in range(0, rows, step):
            shape = (min(step, rows - start), columns)
            integers = tensor.dtype == "U8"
            piece = _integers(draw, shape) if integers else _floats(draw, shape, deviation, dtype)
            piece[:, used:] = ZERO_POINT if integers else 0
            yield piece

    def _panel(self, record: str, panel: int, intermediate: int) -> np.ndarray:
        """One panel of the record; channels beyond the expert's intermediate size are zeros."""
        layout = self._packing.panel
        draw = self._generator(record, panel)
        channels = min(layout.width, intermediate - panel * layout.width)
        inner = layout.hidden**-0.5
        outer = self._branch * (_SWIGLU * intermediate) ** -0.5
        integers = layout.scheme in INTEGER_SCHEMES
        # Integers: the whole panel is drawn at once, then scales and fills are put in their places.
        drawn = {"int8": _integers, "int4": _nibbles}.get(layout.scheme, lambda _, shape: np.zeros(shape, np.uint8))
        packed = drawn(draw, (layout.panel_bytes,))
        deviation = _INT8_DEVIATION if layout.scheme == "int8" else _INT4_DEVIATION
        end = 0
        for part, view in zip(layout.parts, part_views(layout, packed).values(), strict=True):
            packed[end : part.offset] = 0
            end = part.offset + part.nbytes
            if part.name == "gate_scale":
                view[:] = inner / (deviation * STEP)
            elif part.name == "mid_scale":
                view[:] = inner * outer / (deviation * STEP) ** 2
            elif part.name in ("up_scale", "down_scale"):
                view[:] = (inner if part.name == "up_scale" else outer) / (deviation * STEP)
            elif part.name.endswith("_bias"):
                view[:] = 0
                if part.name != "down_bias":
                    view[:channels] = _floats(draw, (channels,), _NORM_SPREAD, view.dtype)
                elif panel == 0:
                    view[:] = _floats(draw, view.shape, _NORM_SPREAD * self._branch, view.dtype)
            else:
                down = part.name.startswith("down")
                own = channels if down else min(max(channels - _first_column(part), 0), part.shape[1])
                if integers:
                    _fill(part, view, own, nibbles=layout.scheme == "int4")
                else:
                    used = view[:own] if down else view[:, :own]
                    used[...] = _floats(draw, used.shape, outer if down else inner, view.dtype)
        packed[end:] = 0
        return packed

    def _generator(self, name: str, panel: int) -> np.random.Generator:
        key = (zlib.crc32(name.encode()), panel)
        return np.random.Generator(np.random.SFC64(np.random.SeedSequence(self._seed, spawn_key=key)))


# Uniform over the odd integers of 8 bits: zero mean, never -128, and one operation per word.
_INT8_DEVIATION = float(np.sqrt((128**2 - 1) / 3))


# Nibbles uniform over -7, -5, … 7; multipliers over 8 … 15.
_INT4_DEVIATION = float(np.sqrt((8**2 - 1) / 3 * np.mean(np.arange(8, 16) ** 2)))


def _first_column(part: Part) -> int:
    """Of a column chunk, in its matrix."""
    return int((*part.name.split("."), "0")[1]) * part.shape[1]


def _fill(part: Part, view: np.ndarray, channels: int, *, nibbles: bool) -> None:
    """Makes drawn bytes a part of a panel: zeros beyond its own `channels`, multipliers in their range."""
    down = part.name.startswith("down")
    if "_multiplier" in part.name:
        view &= 7
        view |= 8
        (view[-(-channels // INT4_GROUP) :] if down else view[:, channels:])[...] = 1
    elif not nibbles:
        (view[channels:] if down else view[:, channels:])[...] = ZERO_POINT
    elif down:
        low, high = view[channels:], view[max(0, channels - len(view)) :]  # the halves' rows beyond `channels`
        low &= 0xF0
        low |= 0x08
        high &= 0x0F
        high |= 0x80
    else:
        view[:, channels:] = 0x88


def _nibbles(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """uint8 of `shape`, two odd nibbles each."""
    return _words(draw, shape, 0x1111111111111111)


def _integers(draw: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    """Bytes of `shape`, uniform over 1, 3, … 255: integers -127, -125, … 127."""
    return _words(draw, shape, 0x0101010101010101)


def _words(draw: np.random.Generator, shape: tuple[int, ...], ones: int) -> np.ndarray:
    """Random bytes of `shape` in which the bits of `ones` are set."""
    count = int(np.prod(shape))
    words = draw.integers(0, 1 << 64, -(-count // 8), dtype=np.uint64)
    words |= np.uint64(ones)
    return words.view(np.uint8)[:count].reshape(shape)


def _floats(draw: np.random.Generator, shape: tuple[int, ...], deviation: float, dtype: np.dtype) -> np.ndarray:
    """`dtype` of `shape`, uniform over 65536 equally spaced values of zero mean and standard deviation `deviation`."""
    count = int(np.prod(shape))
    words = draw.integers(0, 1 << 64, -(-count // 4), dtype=np.uint64).view(np.uint16)
    table, values = _table(deviation, dtype), np.empty(count, dtype)
    for start in range(0, count, _TAKEN):
        piece = slice(start, min(start + _TAKEN, count))
        np.take(table, words[piece], out=values[piece], mode="clip")
    return values.reshape(shape)


_TAKEN = 1 << 15  # looked up at a time: stays in the cache


@lru_cache(maxsize=16)
def _table(deviation: float, dtype: np.dtype) -> np.ndarray:
    """The values, looked up because numpy converts to float16 five times slower than it looks up."""
    steps = np.arange(1 << 16) - ((1 << 16) - 1) / 2
    return (steps * (deviation / np.sqrt(((1 << 32) - 1) / 12))).astype(dtype)
