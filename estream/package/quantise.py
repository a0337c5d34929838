"""From float32 weights to the numbers of a scheme.

Every function is local to a panel or a tensor: nothing is calibrated.

int8 is symmetric: integers in [-127, 127], one float32 scale per channel, weight = integer · scale.
int4 is symmetric: the same, with integer = (nibble - 8) · multiplier, in [-126, 126].
"""

from __future__ import annotations

import numpy as np

from estream.errors import CheckpointError
from estream.package.layout import DTYPES, INT4_GROUP, PanelLayout

_F16_MAX = float(np.finfo(np.float16).max)
_TINY = np.finfo(np.float32).tiny
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


def to_int8(weights: np.ndarray, axis: int, name: str) -> tuple[np.ndarray, np.ndarray]:
    """Symmetric int8 of a matrix float32 [K, N], with one scale per column (axis=0) or per row (axis=1).

    `axis` is the one that shares a scale. Returns integers int8 [K, N] and scales float32 [N] or [K].
    A channel whose largest magnitude is too small for a normal float32 scale becomes zeros with scale 1.

    Raises:
        CheckpointError: NaN or infinity; names the tensor `name`.
    """
    scale = _channel_scale(weights, axis, name)
    scaled = weights / np.expand_dims(scale, axis)
    np.rint(scaled, out=scaled)
    np.clip(scaled, -127, 127, out=scaled)
    return scaled.astype(np.int8), scale


def to_int4(weights: np.ndarray, axis: int, name: str) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Symmetric int4 of a matrix float32 [K, N], K a multiple of 64; one scale per column (axis=0) or row (axis=1).

    Returns packed nibbles U8 [K/2, N], multipliers U8 [K/32, N] and scales float32 [N] or [K]; see `PanelLayout`.
    A group's multiplier is that of the three about largest / 7.5 whose squared error is the least; trying all 18 gains
    less than half a per cent. A group of zeros has multiplier 1.

    Raises:
        CheckpointError: NaN or infinity; names the tensor `name`.
    """
    inputs, outputs = weights.shape
    scale = np.expand_dims(_channel_scale(weights, axis, name), axis)
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
    return packed, multipliers[:, 0].astype(np.uint8), np.squeeze(scale, axis)


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


def _channel_scale(weights: np.ndarray, axis: int, name: str) -> np.ndarray:
    """Float32 scales that make the largest magnitude of each channel 127; 1 where no normal scale does."""
    largest = np.maximum(weights.max(axis=axis), -weights.min(axis=axis))
    if not np.isfinite(largest).all():  # NaN and infinity survive max and min
        check_finite(weights, name)
    scale = (largest / np.float32(127)).astype(np.float32)
    scale[scale < _TINY] = 1
    return scale


def panel_bytes(
    layout: PanelLayout,
    gate: np.ndarray,
    up: np.ndarray,
    down: np.ndarray,
    names: tuple[str, str, str],
) -> np.ndarray:
    """One packed panel, U8 [panel_bytes], from float32 gate and up [H, n] and down [n, H] with n <= Ip.

    Missing channels are zeros: they add nothing to y. `names` are the checkpoint tensors, for messages.

    Raises:
        CheckpointError: a weight that is not finite or does not fit the scheme.
    """
    channels = gate.shape[1]
    if layout.scheme == "int4":
        # Padded first: a group of down may be part weights, part fill.
        wide, tall = ((0, 0), (0, layout.width - channels)), ((0, layout.width - channels), (0, 0))
        values = _int4_parts(np.pad(gate, wide), np.pad(up, wide), np.pad(down, tall), names)
    elif layout.scheme == "int8":
        values = _int8_parts(gate, up, down, names)
    else:
        dtype = layout.parts[0].dtype
        values = {
            key: to_float(array, dtype, name)
            for key, array, name in zip(("gate", "up", "down"), (gate, up, down), names, strict=True)
        }
    panel = np.zeros(layout.panel_bytes, dtype=np.uint8)
    for part, view in part_views(layout, panel).items():
        value = values[part]
        if view.shape == value.shape:
            view[...] = value
        elif part == "down":
            view[:channels] = value
        else:
            view[..., :channels] = value
            if part.endswith("_scale"):
                view[channels:] = 1
    return panel


Names = tuple[str, str, str]  # of the checkpoint tensors of gate, up and down


def _int8_parts(gate: np.ndarray, up: np.ndarray, down: np.ndarray, names: Names) -> dict[str, np.ndarray]:
    gate, gate_scale = to_int8(gate, 0, names[0])
    up, up_scale = to_int8(up, 0, names[1])
    down, down_scale = to_int8(down, 1, names[2])
    mid_scale = _mid_scale(up_scale, down_scale, names)
    return {"gate": gate, "up": up, "down": down, "gate_scale": gate_scale, "mid_scale": mid_scale}


def _int4_parts(gate: np.ndarray, up: np.ndarray, down: np.ndarray, names: Names) -> dict[str, np.ndarray]:
    gate, gate_multiplier, gate_scale = to_int4(gate, 0, names[0])
    up, up_multiplier, up_scale = to_int4(up, 0, names[1])
    down, down_multiplier, down_scale = to_int4(down, 1, names[2])
    return {
        "gate": gate,
        "up": up,
        "down": down,
        "gate_scale": gate_scale,
        "mid_scale": _mid_scale(up_scale, down_scale, names),
        "gate_multiplier": gate_multiplier,
        "up_multiplier": up_multiplier,
        "down_multiplier": down_multiplier,
    }


def _mid_scale(up_scale: np.ndarray, down_scale: np.ndarray, names: Names) -> np.ndarray:
    with np.errstate(over="ignore", under="ignore"):
        mid_scale: np.ndarray = up_scale * down_scale
    if not np.isfinite(mid_scale).all():
        raise CheckpointError(
            f"the scales of {names[1]} and {names[2]} multiply to infinity",
            asked="weights of a trained model",
            had=f"largest scales {up_scale.max():g} and {down_scale.max():g}",
            next_step="Pack with --experts f32",
        )
    return mid_scale


def part_views(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """Writable views of a packed panel's parts, each with its own dtype and shape. `panel`: U8 [panel_bytes]."""
    return {
        part.name: panel[part.offset : part.offset + part.nbytes].view(DTYPES[part.dtype]).reshape(part.shape)
        for part in layout.parts
    }
