"""What needs no reference: two prompts that share no token must give two answers, and nothing may be zero."""

from __future__ import annotations

import zlib
from collections.abc import Mapping

import numpy as np

from estream.layers.observe import Rows
from estream.selftest.record import Key, indices

LEAST_DIFFERENCE = 0.01  # of the logits of two prompts, relative; random tokens give 0.3 and more


def two_prompts(vocab: int, tokens: int) -> tuple[np.ndarray, np.ndarray]:
    """Two prompts of random tokens, int64 [tokens] each, the same on every machine; they differ at every position."""
    draw = np.random.default_rng(20)
    first = draw.integers(0, vocab, tokens)
    return first, (first + draw.integers(1, vocab, tokens)) % vocab


class Outline:
    """An observer that keeps of every output whether it was zero, and a checksum."""

    def __init__(self) -> None:
        self._checksums: dict[tuple[Key, int], int] = {}
        self._zero: dict[Key, bool] = {}

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None:
        for name, array in arrays.items():
            key = Key(layer, graph, name)  # one expert alone may give next to nothing, a layer's cannot
            self._zero[key] = self._zero.get(key, True) and not array.any()
            if panel is None:
                self._checksums[key, int(indices(rows)[0])] = zlib.crc32(array.tobytes())

    def zeros(self) -> list[Key]:
        """Outputs that were zero from end to end."""
        return [key for key, zero in self._zero.items() if zero]

    def same(self, other: Outline) -> list[Key]:
        """Outputs that another prompt gave byte for byte, too."""
        both = [where for where, crc in self._checksums.items() if other._checksums.get(where) == crc]
        return list(dict.fromkeys(key for key, _ in both))


def difference(first: np.ndarray, second: np.ndarray) -> float:
    """Norm of the difference of two prompts' logits over the norm of the first's, both float32 [N, V].

    The mean over the rows is taken off first: what all tokens have in common is no answer.
    """
    common = first.mean(axis=0, dtype=np.float64)
    size = float(np.linalg.norm(first - common)) if len(first) > 1 else float(np.linalg.norm(first.astype(np.float64)))
    gap = float(np.linalg.norm(first.astype(np.float64) - second))
    return gap / size if size else 0.0
