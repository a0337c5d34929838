"""From float32 weights to the numbers of a scheme.

Every function is local to a panel or a tensor: nothing is calibrated.

int8 is symmetric: weight = integer / 128 · magnitude, integers in [-127, 127], one float16 magnitude per channel; the
magnitude is rounded first, so that its rounding costs nothing. int4 is the same with integers (nibble - 8) · multiplier
in [-126, 126].
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from estream.errors import CheckpointError
from estream.package.chunks import chunk_names
from estream.package.layout import DTYPES, INT4_GROUP, INTEGER_SCHEMES, STEP, ZERO_POINT, PanelLayout

_F16_MAX = float(np.finfo(np.float16).max)
_LARGEST = 127  # integers are symmetric
_MOST_MULTIPLIER = 18  # 7 · 18 = 126 is the largest product of a nibble that 8 bits hold


def check_finite(weights: np.ndarray, name: str) -> None:
    """Raises CheckpointError naming the tensor `name` if it holds NaN or infinity."""
    # One pass without a temporary: NaN and infinity survive min and max.
    if weights.size == 0 or (np.isfinite(weights.min()) and np.isfinite(weights.max())):
        return
    bad = ~np.isfinite(weights)
    what = "NaN" if np.isnan(weights).any() else "infinity"
    raise CheckpointError(
        f"tensor {name} holds {what}",
        asked="finite weights",
        had=f"{int(bad.sum())} of {weights.size} values that are not finite",
        next_step="The checkpoint is damaged or was not saved correctly; download or export it again",
    )


def to_float(weights: np.ndarray, dtype: str, name: str) -> np.ndarray:
    """Finite float32 weights as F32 or F16.

    Raises:
        CheckpointError: NaN or infinity in `weights`, or a value beyond the range of float16; names the tensor `name`.
    """
    check_finite(weights, name)
    if dtype == "F32":
        return np.ascontiguousarray(weights, dtype=np.float32)
    with np.errstate(over="ignore"):
        result = np.ascontiguousarray(weights, dtype=DTYPES[dtype])
    # After rounding: 65519 still becomes 65504, 65520 becomes infinity.
    if result.size and not (np.isfinite(result.min()) and np.isfinite(result.max())):
        raise CheckpointError(
            f"tensor {name} does not fit float16",
            asked=f"|w| <= {_F16_MAX:g}",
            had=f"{float(np.abs(weights).max()):g}",
            next_step="Pack with --experts f32 --dense f32, or --experts int8 --dense int8",
        )
    return result


def channel_magnitudes(weights: np.ndarray, axis: int, name: str) -> np.ndarray:
    """The least float16 magnitudes that keep each channel's integers within ±127; 1 for a channel of zeros.

    `axis` of float32 [K, N] is the one that shares a magnitude: 0 gives [N], 1 gives [K].

    Raises:
        CheckpointError: NaN, infinity, or a weight that no float16 magnitude holds; names the tensor `name`.
    """
    largest = np.maximum(weights.max(axis=axis), -weights.min(axis=axis))
    if not np.isfinite(largest).all():  # NaN and infinity survive max and min
        check_finite(weights, name)
    needed = largest.astype(np.float64) / (_LARGEST * STEP)
    magnitude = _up_to_half(needed)
    if not np.isfinite(magnitude).all():
        raise CheckpointError(
            f"the magnitudes of tensor {name} do not fit float16",
            asked=f"|w| <= {_F16_MAX * _LARGEST * STEP:g}",
            had=f"{float(largest.max()):g}",
            next_step="Pack with --experts f32 --dense f32",
        )
    magnitude[largest == 0] = 1
    return magnitude


def _up_to_half(values: np.ndarray) -> np.ndarray:
    """Float64 values ≥ 0 rounded up to float16; beyond its range, infinity."""
    with np.errstate(over="ignore", under="ignore"):
        result = values.astype(np.float16)
        return np.where(result < values, np.nextafter(result, np.float16(np.inf)), result)


def to_int8(weights: np.ndarray, axis: int, magnitude: np.ndarray) -> np.ndarray:
    """Bytes U8 [K, N] of a matrix float32 [K, N]: integers + 128, for `channel_magnitudes` along the same axis."""
    scaled = weights / np.expand_dims(magnitude.astype(np.float32) * np.float32(STEP), axis)
    np.rint(scaled, out=scaled)
    np.clip(scaled, -_LARGEST, _LARGEST, out=scaled)
    scaled += np.float32(ZERO_POINT)
    return scaled.astype(np.uint8)


def to_int4(weights: np.ndarray, axis: int, magnitude: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int4 of a matrix float32 [K, N], K a multiple of 64, for `channel_magnitudes` along the same axis.

    Returns packed nibbles U8 [K/2, N] and multipliers U8 [K/32, N]; see `PanelLayout`. A group's multiplier is that of
    the three about largest / 7.5 whose squared error is the least; trying all 18 gains less than half a per cent. A
    group of zeros has multiplier 1.
    """
    inputs, outputs = weights.shape
    scale = np.expand_dims(magnitude.astype(np.float32) * np.float32(STEP), axis)
    groups = (weights / scale).reshape(inputs // INT4_GROUP, INT4_GROUP, outputs)
    # Errors count as they are in the weights: the channels of a group have scales of their own if axis is 1.
    size = (scale / scale.max()).reshape(len(groups), INT4_GROUP, 1) if axis == 1 else None
    multipliers = np.empty((len(groups), 1, outputs), np.float32)
    step = max(1, _CACHED // (INT4_GROUP * outputs))
    for start in range(0, len(groups), step):
        part = slice(start, start + step)
        multipliers[part] = _multipliers(groups[part], size if size is None else size[part])
        groups[part] = _four_bits(groups[part], multipliers[part])
    nibbles = (groups + 8).astype(np.uint8).reshape(inputs, outputs)
    packed = nibbles[: inputs // 2] | nibbles[inputs // 2 :] << 4
    return packed, multipliers[:, 0].astype(np.uint8)


_CACHED = 1 << 16  # weights at a time, so that temporaries stay in the cache


def _multipliers(groups: np.ndarray, size: np.ndarray | None) -> np.ndarray:
    """The best multipliers [G, 1, N] of groups [G, 32, N] of numbers within ±127; `size` weighs the rows' errors."""
    centre = np.rint(np.abs(groups).max(axis=1, keepdims=True) / np.float32(7.5))
    best = least = np.empty(0)
    for step in (0, -1, 1):
        multiplier = np.clip(centre + np.float32(step), 1, _MOST_MULTIPLIER)
        difference = _four_bits(groups, multiplier)
        difference *= multiplier
        difference -= groups
        if size is not None:
            difference *= size
        error = np.square(difference, out=difference).sum(axis=1, keepdims=True)
        if step == 0:
            best, least = multiplier, error
        else:
            best = np.where(error < least, multiplier, best)
            least = np.minimum(error, least)
    return best


def _four_bits(groups: np.ndarray, multiplier: np.ndarray) -> np.ndarray:
    """groups / multiplier, rounded, within ±7."""
    values = groups * (np.float32(1) / multiplier)
    np.rint(values, out=values)
    return np.clip(values, -7, 7, out=values)


def panel_bytes(
    layout: PanelLayout,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    names: tuple[str, str, str],
    biases: Biases | None = None,
) -> np.ndarray:
    """One packed panel, U8 [panel_bytes], from float32 gate and up [H, n] and down [n, H] with n <= Ip.

    Missing channels are zeros: they add nothing to y. `names` are the checkpoint tensors, for messages. `biases`, of a
    biased layout: gate's and up's float32 [n], down's [H].

    Raises:
        CheckpointError: a weight that is not finite or does not fit the scheme.
    """
    missing = layout.width - gate.shape[1]
    if missing:  # before quantising: a group of int4 may be part weights, part fill
        gate, up = (np.pad(matrix, ((0, 0), (0, missing))) for matrix in (gate, up))
        down = np.pad(down, ((0, missing), (0, 0)))
    matrices = dict(zip(("gate", "up", "down"), (gate, up, down), strict=True))
    if layout.scheme in INTEGER_SCHEMES:
        values = _integer_parts(layout, matrices, names)
    else:
        dtype = layout.parts[0].dtype
        values = {
            key: to_float(matrix, dtype, name) for (key, matrix), name in zip(matrices.items(), names, strict=True)
        }
    panel = np.zeros(layout.panel_bytes, dtype=np.uint8)
    views = part_views(layout, panel)
    if biases is not None:
        dtype = "F32" if layout.scheme == "f32" else "F16"
        for name, bias, tensor in zip(("gate_bias", "up_bias", "down_bias"), biases, names, strict=True):
            views[name][: len(bias)] = to_float(bias, dtype, f"{tensor} (its bias)")
    for name, value in values.items():
        if name.endswith("_scale"):
            views[name][...] = value
        else:
            for key, piece in columns(name, value, layout.chunks):
                views[key][...] = piece
    return panel


Names = tuple[str, str, str]  # of the checkpoint tensors of gate, up and down
Biases = tuple[np.ndarray, np.ndarray, np.ndarray]


def _integer_parts(layout: PanelLayout, matrices: dict[str, np.ndarray], names: Names) -> dict[str, np.ndarray]:
    """Parts of a panel before they are cut into column chunks."""
    gate = channel_magnitudes(matrices["gate"], 0, names[0])
    up = channel_magnitudes(matrices["up"], 0, names[1])
    down = channel_magnitudes(matrices["down"], 1, names[2])
    if layout.scheme == "int4":
        down = min((down, _evened(down, matrices["down"])), key=lambda one: _int4_error(matrices["down"], one))
    magnitudes = {"gate": gate, "up": up, "down": down}
    values: dict[str, np.ndarray] = {"gate_scale": gate}
    if layout.biased:
        values |= {"up_scale": up, "down_scale": down}
    else:
        values["mid_scale"] = mid = _mid_scale(up, down, names)
        # What the stored product makes of down's magnitudes, so that rounding it costs nothing either.
        magnitudes["down"] = mid.astype(np.float32) / up
    for name, matrix in matrices.items():
        axis = 1 if name == "down" else 0
        if layout.scheme == "int8":
            values[name] = to_int8(matrix, axis, magnitudes[name])
        else:
            values[name], values[f"{name}_multiplier"] = to_int4(matrix, axis, magnitudes[name])
    return values


_LEAST_PEAK = 6.0


def _evened(magnitude: np.ndarray, down: np.ndarray) -> np.ndarray:
    """Magnitudes [K] of the rows of down [K, N] for int4: at least _LEAST_PEAK root mean squares of each row.

    The rows of a group share multipliers: where each row is scaled to its own largest entry, one with an outlier
    has small numbers beside the others' and keeps few of 15 steps. 6 leaves 4 to 29 % less squared error than 0 in the
    layers of the derived demonstration model; in normally distributed weights it leaves more.
    """
    size = np.sqrt(np.square(down, dtype=np.float64).mean(axis=1)) * (_LEAST_PEAK / (_LARGEST * STEP))
    with np.errstate(over="ignore"):
        least = size.astype(np.float16)
    return np.maximum(magnitude, np.where(np.isfinite(least), least, magnitude))


def _int4_error(weights: np.ndarray, magnitude: np.ndarray) -> float:
    """Squared error of `to_int4` along axis 1."""
    packed, multipliers = to_int4(weights, 1, magnitude)
    half = len(packed)
    error = 0.0
    for start, nibbles in ((0, packed & 15), (half, packed >> 4)):
        integers = nibbles.astype(np.float32) - 8
        integers *= np.repeat(multipliers[start // INT4_GROUP :][: half // INT4_GROUP], INT4_GROUP, axis=0)
        integers *= magnitude[start : start + half, None].astype(np.float32) * np.float32(STEP)
        integers -= weights[start : start + half]
        error += float(np.square(integers, out=integers).sum(dtype=np.float64))
    return error


def _mid_scale(up: np.ndarray, down: np.ndarray, names: Names) -> np.ndarray:
    """The product of two channels' magnitudes, rounded up to float16."""
    mid_scale = _up_to_half(up.astype(np.float64) * down)
    if not np.isfinite(mid_scale).all():
        raise CheckpointError(
            f"the magnitudes of {names[1]} and {names[2]} multiply to infinity in float16",
            asked="weights of a trained model",
            had=f"largest magnitudes {up.max():g} and {down.max():g}",
            next_step="Pack with --experts f32",
        )
    return mid_scale


def columns(name: str, matrix: np.ndarray, chunks: int) -> Iterator[tuple[str, np.ndarray]]:
    """(name, view) of a matrix's column chunks, in order."""
    return zip(chunk_names(name, chunks), np.split(matrix, chunks, axis=1), strict=True)


def part_views(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """Writable views of a packed panel's parts, each with its own dtype and shape. `panel`: U8 [panel_bytes]."""
    return {
        part.name: panel[part.offset : part.offset + part.nbytes].view(DTYPES[part.dtype]).reshape(part.shape)
        for part in layout.parts
    }
