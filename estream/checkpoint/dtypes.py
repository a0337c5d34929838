"""Float dtypes of checkpoints, widened to float32 without loss: NaN, infinities, subnormals and -0 survive.

FP8 values are without the scales of their blocks.
"""

from __future__ import annotations

import numpy as np

from estream.checkpoint import fp8

# safetensors name -> dtype of the stored words; bf16 words are the upper halves of float32 words
STORED: dict[str, np.dtype] = {
    "F32": np.dtype("<f4"),
    "F16": np.dtype("<f2"),
    "BF16": np.dtype("<u2"),
    fp8.DTYPE: np.dtype("u1"),
}


def widen(words: np.ndarray, dtype: str) -> np.ndarray:
    """float32 values of `words`, an array of STORED[dtype]. float32 comes back as it is, not copied."""
    if words.dtype != STORED[dtype]:
        raise ValueError(f"{dtype} is stored as {STORED[dtype]}, not as {words.dtype}")
    if dtype == "BF16":
        wide: np.ndarray = words.astype(np.uint32)
        wide <<= 16
        return wide.view(np.float32)
    if dtype == fp8.DTYPE:
        return fp8.float_of_byte()[words]
    return words.astype(np.float32, copy=False)
