"""From float32 weights to the numbers of a scheme.

Every function is local to a panel or a tensor: nothing is calibrated.

int8 is symmetric: integers in [-127, 127], one float32 scale per channel, weight = integer · scale.
"""

from __future__ import annotations

import numpy as np

from estream.errors import CheckpointError
from estream.package.layout import DTYPES, PanelLayout

_F16_MAX = float(np.finfo(np.float16).max)
_TINY = np.finfo(np.float32).tiny


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
    largest = np.maximum(weights.max(axis=axis), -weights.min(axis=axis))
    if not np.isfinite(largest).all():  # NaN and infinity survive max and min
        check_finite(weights, name)
    scale = (largest / np.float32(127)).astype(np.float32)
    empty = scale < _TINY
    scale[empty] = 1
    scaled = weights / np.expand_dims(scale, axis)
    np.rint(scaled, out=scaled)
    np.clip(scaled, -127, 127, out=scaled)
    return scaled.astype(np.int8), scale


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
    if layout.scheme == "int8":
        gate, gate_scale = to_int8(gate, 0, names[0])
        up, up_scale = to_int8(up, 0, names[1])
        down, down_scale = to_int8(down, 1, names[2])
        with np.errstate(over="ignore", under="ignore"):
            mid_scale = up_scale * down_scale
        if not np.isfinite(mid_scale).all():
            raise CheckpointError(
                f"the scales of {names[1]} and {names[2]} multiply to infinity",
                asked="weights of a trained model",
                had=f"largest scales {up_scale.max():g} and {down_scale.max():g}",
                next_step="Pack with --experts f32",
            )
        values = {"gate": gate, "up": up, "down": down, "gate_scale": gate_scale, "mid_scale": mid_scale}
    else:
        dtype = layout.parts[0].dtype
        values = {
            key: to_float(array, dtype, name)
            for key, array, name in zip(("gate", "up", "down"), (gate, up, down), names, strict=True)
        }
    panel = np.zeros(layout.panel_bytes, dtype=np.uint8)
    for part, view in part_views(layout, panel).items():
        if part == "down":
            view[:channels] = values[part]
        else:
            view[..., :channels] = values[part]
            if part.endswith("_scale"):
                view[channels:] = 1
    return panel


def part_views(layout: PanelLayout, panel: np.ndarray) -> dict[str, np.ndarray]:
    """Writable views of a packed panel's parts, each with its own dtype and shape. `panel`: U8 [panel_bytes]."""
    return {
        part.name: panel[part.offset : part.offset + part.nbytes].view(DTYPES[part.dtype]).reshape(part.shape)
        for part in layout.parts
    }
