"""Memory that host and NPU share, from the QNN provider's allocator: bound by address, never copied.

The provider maps it through the phone's libcdsprpc.so and finds the mapping that holds a bound address, so that parts
of one mapping are tensors. Mappings are dma-bufs: they take memory from the start, and the kernel does not count them
as the process's.
"""

from __future__ import annotations

import ctypes
import logging
from bisect import bisect_right
from collections.abc import Sequence
from contextlib import ExitStack

from estream.errors import TargetError
from estream.runtime.capi import CApi
from estream.runtime.pieces import LARGEST, PAGE, Refused, map_pieces
from estream.runtime.target import Buffer

BLOCK = 4 << 20  # bytes; allocations of a quarter or less share one: a process has few file descriptors and mappings
HOST_ACCESSIBLE = 5  # OrtDeviceMemoryType
LIBRARY = "libcdsprpc.so"
_FUNCTIONS = ("rpcmem_alloc", "rpcmem_free", "rpcmem_to_fd", "remote_register_buf_attr2")

_WITHOUT = "Set ESTREAM_SHARED_MEMORY=off to run in the host's memory, which the NPU's driver copies at every call"
_log = logging.getLogger("estream.memory")


def check_library() -> None:
    """Raises TargetError: the phone's library cannot be loaded, or lacks what the provider takes from it.

    For when a session could not be made: the provider says of this no more than "unknown exception".
    """
    try:
        library = ctypes.CDLL(LIBRARY)
    except OSError as error:
        raise TargetError(
            f"no memory can be shared with the NPU: {LIBRARY} cannot be loaded: {error}",
            next_step=f"Put its folder (on a phone /vendor/lib64) on LD_LIBRARY_PATH. {_WITHOUT}",
        ) from error
    missing = [name for name in _FUNCTIONS if not hasattr(library, name)]
    if missing:
        raise TargetError(
            f"no memory can be shared with the NPU: {LIBRARY} lacks {', '.join(missing)}", next_step=_WITHOUT
        )


class SharedMemory:
    """Page-aligned, zeroed by the kernel. All of it goes back with `close`, before the session that it came from.

    Raises TargetError: the provider has no such allocator.
    """

    def __init__(self, api: CApi, device: int, session: int) -> None:
        info = api.shared_memory_info(device, HOST_ACCESSIBLE)
        if not info:
            raise TargetError(
                "the QNN provider has no allocator of shared memory",
                next_step=f"Take a provider that knows enable_htp_shared_memory_allocator. {_WITHOUT}",
            )
        self.memory_info: int = info  # the device's
        self._api = api
        self._allocator: int | None = api.create("CreateAllocator", session, info, what="allocator of shared memory")
        self._starts: list[int] = []  # addresses of the mappings, ascending
        self._sizes: dict[int, int] = {}
        self._block: Buffer | None = None  # what is left of it
        self._largest = LARGEST
        self._refusal = ""

    @property
    def nbytes(self) -> int:
        """Mapped, whether in use or not."""
        return sum(self._sizes.values())

    @property
    def mappings(self) -> int:
        return len(self._starts)

    def owns(self, buffer: Buffer) -> bool:
        """Whether the whole buffer lies in one mapping."""
        at = bisect_right(self._starts, buffer.address) - 1
        if at < 0:
            return False
        start = self._starts[at]
        return buffer.address + buffer.nbytes <= start + self._sizes[start]

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """One piece. Raises TargetError."""
        if 0 < nbytes <= BLOCK // 4:
            return self._small(nbytes, label)
        return self.allocate_pieces([nbytes], label)[0]

    def allocate_pieces(self, sizes: Sequence[int], label: str) -> list[Buffer]:
        """Pieces of these sizes in few mappings of less than 2 GiB, smaller ones where large ones are refused.

        Raises TargetError naming bytes asked, bytes mapped and the sizes that were refused; nothing of the call stays.
        """
        if any(size <= 0 for size in sizes):
            raise TargetError(f"an allocation for {label} must be positive", asked=f"{min(sizes)} bytes")
        before, found, made = self.nbytes, list[Buffer](), list[int]()
        try:
            for address, pieces in map_pieces(sizes, self._map, self._largest):
                made.append(address)
                found += pieces
        except BaseException as error:
            for address in made:
                self._unmap(address)
            if not isinstance(error, Refused):
                raise
            tried = ", ".join(map(str, error.tried))
            raise TargetError(
                f"shared memory for {label} was refused ({self._refusal}): mappings of {tried} bytes",
                asked=f"{error.asked} bytes",
                had=f"{error.mapped} of them mapped, {before} bytes before",
                next_step="Give a smaller memory budget or a shorter prompt, or end other apps that use the NPU",
            ) from error
        return found

    def close(self) -> None:
        """Frees every mapping, the last one first, then the allocator. Twice is harmless."""
        allocator, self._block = self._allocator, None
        if allocator is None:
            return
        with ExitStack() as returned:  # in the opposite order, each whatever becomes of the others
            returned.callback(self._api.release, "Allocator", allocator)
            returned.callback(setattr, self, "_allocator", None)
            for address in self._sizes:
                returned.callback(self._unmap, address)

    def _small(self, nbytes: int, label: str) -> Buffer:
        pages = -(-nbytes // PAGE) * PAGE
        if self._block is None or self._block.nbytes < pages:
            self._block = self.allocate_pieces([BLOCK], label)[0]
        block = self._block
        self._block = block.part(pages, block.nbytes - pages)
        return block.part(0, nbytes)

    def _map(self, nbytes: int) -> int | None:
        try:
            address = self._api.create("AllocatorAlloc", self._allocator, nbytes, what="AllocatorAlloc")
        except TargetError as error:
            if not self._refusal:
                _log.warning("shared memory: a mapping of %d bytes was refused: %s", nbytes, error)
            self._refusal, self._largest = error.thing, max(nbytes // 2, BLOCK)
            return None
        at = bisect_right(self._starts, address)
        self._starts.insert(at, address)
        self._sizes[address] = nbytes
        if address % PAGE:
            self._unmap(address)
            raise TargetError("shared memory does not start on a page", asked=f"{PAGE}", had=f"{address:#x}")
        return address

    def _unmap(self, address: int) -> None:
        self._starts.remove(address)
        del self._sizes[address]
        self._api.call("AllocatorFree", self._allocator, address, what="returning shared memory")
