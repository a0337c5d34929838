"""Activations of one prefill: the hidden state and what its graphs read and write block by block.

The hidden state stays in float32 on the host. Graphs see fixed block buffers, so that the set of bound addresses does
not grow with the prompt.
"""

from __future__ import annotations

import numpy as np

from estream.errors import NumericError
from estream.models.base import Architecture
from estream.runtime.target import Buffer, Target

BLOCK = 256  # rows of one qkv → attention → o+norm+router pass: attention scratch grows with it


class State:
    """hidden, normed float32 [max_tokens, H]; logits float32 [max_tokens, R]; K and V, or past, of one layer; block
    buffers.

    Memory that a short prompt does not touch is reserved, not committed. integers: also what integer products of
    experts gather from, `rows8` uint8 [max_tokens, H] and `row_scales` float32 [max_tokens, 1].
    """

    def __init__(self, target: Target, arch: Architecture, max_tokens: int, *, integers: bool) -> None:
        attention = arch.attention
        self.arch = arch
        self.max_tokens = max_tokens
        self.bytes_copied = 0
        self.nbytes = 0
        self._target = target
        self.block = min(BLOCK, target.max_rows)
        # A block of queries meets all keys: the attention graph's scores are float32 [heads, block, keys].
        self.scratch_bytes = 4 * attention.heads * self.block * max_tokens

        self.hidden_buffer = self._allocate("hidden", max_tokens, arch.hidden)
        self.normed_buffer = self._allocate("normed", max_tokens, arch.hidden)
        self.hidden = self.hidden_buffer.array(np.float32, (max_tokens, arch.hidden))
        self.normed = self.normed_buffer.array(np.float32, (max_tokens, arch.hidden))
        self.rows8 = self._allocate("quantised rows", max_tokens, arch.hidden, 1) if integers else None
        self.row_scales = self._allocate("scales of rows", max_tokens, 1) if integers else None
        self.logits = np.zeros((max_tokens, max(arch.router_width, 1)), np.float32)

        self.keys = self._allocate("keys", max_tokens, attention.cache_width)
        self.values = self._allocate("values", max_tokens, attention.cache_width)
        widths = {
            "hidden": arch.hidden,
            "normed": arch.hidden,
            "q": attention.q_width,
            "k": attention.k_width,
            "v": attention.v_width,
            "attn": attention.out_width,
            "logits": max(arch.router_width, 1),
            "cos": attention.rotated // 2,
            "sin": attention.rotated // 2,
        }
        self.blocks = {name: self._allocate(f"block {name}", self.block, width) for name, width in widths.items()}
        self._views = {name: self.blocks[name].array(np.float32, (self.block, width)) for name, width in widths.items()}
        self.last = target.allocate(4, "last key")
        self.total = target.allocate(4, "total keys")
        self.past: Buffer | None = None  # rows of a convolution before the block, float32 [L - 1, H]
        if arch.conv_kernel:
            self.past = self._allocate("past", arch.conv_kernel - 1, arch.hidden)

    def _allocate(self, label: str, rows: int, width: int, itemsize: int = 4) -> Buffer:
        nbytes = max(rows * width, 1) * itemsize
        self.nbytes += nbytes
        return self._target.allocate(nbytes, label)

    def view(self, name: str, rows: int) -> np.ndarray:
        """The first rows of a block buffer, float32."""
        return self._views[name][:rows]

    def load(self, source: np.ndarray, name: str, start: int, rows: int) -> None:
        """Copies rows of a host array into a block buffer."""
        view = self._views[name][:rows]
        np.copyto(view, source[start : start + rows])
        self.bytes_copied += view.nbytes

    def store(self, name: str, destination: np.ndarray, start: int, rows: int) -> None:
        """Copies a block buffer back into rows of a host array."""
        view = self._views[name][:rows]
        np.copyto(destination[start : start + rows], view)
        self.bytes_copied += view.nbytes

    def pad(self, name: str, useful: int, rows: int) -> None:
        """Repeats the last useful row of a block buffer up to `rows` rows."""
        self._views[name][useful:rows] = self._views[name][useful - 1]

    def set_keys(self, total: int) -> None:
        """Tells the attention graph how many keys there are, this block included."""
        self.last.array(np.int32, (1,))[0] = total - 1
        self.total.array(np.int32, (1,))[0] = total

    def forget(self) -> None:
        """A prompt starts: nothing comes before it."""
        if self.past is not None:
            self.past.memory()[:] = bytes(self.past.nbytes)

    def check_finite(self, name: str, start: int, rows: int, where: str) -> None:
        """Checks rows of a block buffer: see `check_finite`."""
        check_finite(self._views[name][:rows], start, where)


def check_finite(block: np.ndarray, start: int, where: str) -> None:
    """The integer kernels turn NaN into finite numbers, so every block is checked before it meets one.

    block: float32 [rows, width] of the tokens from `start`. Raises NumericError naming the first token.
    """
    if not np.isfinite(block).all():
        row = int(np.flatnonzero(~np.isfinite(block).all(axis=1))[0])
        raise NumericError(
            f"{where}, token {start + row}: not finite",
            next_step="Check the weights with `estream verify`; if they are sound, pack with --experts f32",
        )
