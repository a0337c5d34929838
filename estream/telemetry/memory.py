"""What the process holds, from /proc. Where the system does not say, the answer is None."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessMemory:
    """In bytes: the resident set's high-water mark (VmHWM), VmRSS + VmSwap now (what zram holds of the process counts
    in full), dma-bufs that are open or mapped, which are in neither, and shared pages of that set (RssShmem)."""

    vm_hwm_bytes: int | None
    rss_plus_swap_bytes: int | None
    dma_buf_bytes: int | None = None
    rss_shmem_bytes: int | None = None

    def outside(self, shared: int = 0) -> int:
        """Held beside the resident set: dma-bufs, and of `shared`, bytes that are known to be mapped for an NPU, at
        least what the kernel does not count in the resident set."""
        return max(self.dma_buf_bytes or 0, shared - (self.rss_shmem_bytes or 0), 0)

    def held_bytes(self, shared: int = 0) -> int | None:
        """All that is held now."""
        return None if self.rss_plus_swap_bytes is None else self.rss_plus_swap_bytes + self.outside(shared)

    def peak_bytes(self, held: int = 0, shared: int = 0) -> int | None:
        """The largest of the resident marks with what is outside of them, and never below `held`, the bytes known to be
        held: memory that was swapped out is not in VmHWM. None if nothing is known."""
        marks = [mark for mark in (self.vm_hwm_bytes, self.rss_plus_swap_bytes) if mark is not None]
        outside = self.outside(shared)
        known = [*(mark + outside for mark in marks), *(value for value in (held, outside) if value)]
        return max(known, default=None)


def process_memory(proc: str | os.PathLike[str] = "/proc/self") -> ProcessMemory:
    """Reads status, fdinfo and maps below `proc`; what is missing, or cannot be read, gives None."""
    proc = Path(proc)
    text = _read(proc / "status")
    if text is None:
        return ProcessMemory(None, None)
    fields = {name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"^(\w+):\s+(\d+) kB$", text, re.MULTILINE)}
    rss, swap = fields.get("VmRSS"), fields.get("VmSwap")
    return ProcessMemory(
        fields.get("VmHWM"),
        None if rss is None or swap is None else rss + swap,
        _dma_buf_bytes(proc),
        fields.get("RssShmem"),
    )


def _dma_buf_bytes(proc: Path) -> int | None:
    """Each dma-buf once, by inode, whether a descriptor or a mapping holds it; None where neither can be listed."""
    maps = _read(proc / "maps")
    try:
        infos = [_read(entry) or "" for entry in (proc / "fdinfo").iterdir()]
    except OSError:
        if maps is None:
            return None
        infos = []
    sizes: dict[str, int] = {}
    for number, info in enumerate(infos):
        fields = dict(re.findall(r"^(\w+):\s*(\S+)$", info, re.MULTILINE))
        if "exp_name" in fields and fields.get("size", "").isdigit():  # of dma-bufs only
            key = fields.get("ino", f"descriptor {number}")
            sizes[key] = max(sizes.get(key, 0), int(fields["size"]))
    mapped: dict[str, int] = {}
    for start, end, inode in re.findall(r"^(\w+)-(\w+) \S+ \S+ \S+ (\d+)\s+/dmabuf:", maps or "", re.MULTILINE):
        mapped[inode] = mapped.get(inode, 0) + int(end, 16) - int(start, 16)
    for inode, nbytes in mapped.items():
        sizes.setdefault(inode, nbytes)
    return sum(sizes.values())


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None
