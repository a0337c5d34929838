"""Which pieces of memory share a mapping, and what is tried when a mapping is refused. Arithmetic only."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import accumulate

from estream.runtime.target import Buffer

PAGE = 4096
LARGEST = (1 << 31) - PAGE  # of one mapping: rpcmem_alloc takes a signed 32-bit size


class Refused(Exception):
    """A mapping that cannot be made smaller was refused. asked: bytes of all pieces. mapped: of those made before.
    tried: sizes that were refused, in order."""

    def __init__(self, asked: int, mapped: int, tried: Sequence[int]) -> None:
        super().__init__(f"{asked} bytes refused")
        self.asked, self.mapped, self.tried = asked, mapped, tuple(tried)


def map_pieces(
    sizes: Sequence[int], make: Callable[[int], int | None], largest: int = LARGEST
) -> Iterator[tuple[int, list[Buffer]]]:
    """Puts pieces of `sizes` bytes, in order, into as few mappings as `make` grants: (address, pieces) of each mapping.

    make: bytes → address of a new mapping, None: refused. Every piece starts on a page and lies in one mapping. After a
    refusal mappings are at most half as large, down to one piece. Raises Refused; what was yielded is the caller's.
    """
    pages = [-(-size // PAGE) * PAGE for size in sizes]
    ends = [0, *accumulate(pages)]
    first, refused = 0, list[int]()
    while first < len(sizes):
        last = max(first + 1, bisect_right(ends, ends[first] + largest) - 1)
        total = ends[last] - ends[first]
        address = make(total) if total <= LARGEST else None
        if address is not None:
            starts = (address + ends[piece] - ends[first] for piece in range(first, last))
            yield address, [Buffer(at, size) for at, size in zip(starts, sizes[first:last], strict=True)]
            first = last
            continue
        refused.append(total)
        if last == first + 1:
            raise Refused(sum(sizes), ends[first], refused)
        largest = total // 2


def cut(whole: Buffer, sizes: Iterable[int]) -> list[Buffer]:
    """Adjoining parts of a buffer."""
    parts, at = [], 0
    for size in sizes:
        parts.append(whole.part(at, size))
        at += size
    return parts


def join(buffers: Iterable[Buffer]) -> list[Buffer]:
    """Neighbours in memory become one."""
    joined: list[Buffer] = []
    for buffer in buffers:
        if joined and joined[-1].address + joined[-1].nbytes == buffer.address:
            buffer = Buffer(joined[-1].address, joined.pop().nbytes + buffer.nbytes)
        joined.append(buffer)
    return joined
