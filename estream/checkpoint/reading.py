"""Bytes of a checkpoint tensor: which ones a source picks, how they are read, how they are widened."""

from __future__ import annotations

import math
import os

import numpy as np

from estream.checkpoint.dtypes import widen
from estream.errors import CheckpointError
from estream.models.base import Source

_TILE = 256  # transposed in squares that fit the cache, 4 times faster than row by row


def copy_widened(view: np.ndarray, words: np.ndarray, dtype: str) -> None:
    """`view` float32 = `words`, stored as the safetensors dtype says; `view` may be a transpose."""
    if view.ndim != 2 or view.flags.c_contiguous:
        view[...] = widen(words, dtype)
        return
    for row in range(0, view.shape[0], _TILE):
        for column in range(0, view.shape[1], _TILE):
            tile = (slice(row, row + _TILE), slice(column, column + _TILE))
            view[tile] = widen(words[tile], dtype)


def pread(fd: int, words: np.ndarray, position: int, name: str) -> None:
    """Fills `words` from a file's byte `position` on. Raises CheckpointError naming the tensor: truncated, I/O."""
    memory = words.reshape(-1).view(np.uint8).data
    while memory:
        try:
            count = os.preadv(fd, [memory], position)
        except OSError as problem:
            raise CheckpointError(f"tensor {name!r} cannot be read: {problem.strerror}") from problem
        if count == 0:
            raise CheckpointError(
                f"tensor {name!r}: the file was truncated",
                asked=f"{len(memory)} more bytes",
                next_step="Download it again",
            )
        memory = memory[count:]
        position += count


def window(source: Source) -> tuple[int, tuple[int, ...], tuple[int | slice, ...]]:
    """The contiguous piece that `pick` lies in: its first element, its shape, and what is left to pick from it."""
    first, shape, pick = 0, source.shape, source.pick
    while pick and isinstance(pick[0], int):
        if not 0 <= pick[0] < shape[0]:
            raise CheckpointError(f"tensor {source.name!r}: index", asked=pick[0], had=f"0 to {shape[0] - 1}")
        first += pick[0] * math.prod(shape[1:])
        shape, pick = shape[1:], pick[1:]
    if pick and isinstance(pick[0], slice):
        start, stop, step = pick[0].indices(shape[0])
        if step == 1:
            first += start * math.prod(shape[1:])
            shape, pick = (max(0, stop - start), *shape[1:]), pick[1:]
            if pick:
                pick = (slice(None), *pick)
    return first, shape, pick
