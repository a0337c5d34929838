"""What the process holds, from /proc. Where the system does not say, the answer is None."""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class ProcessMemory:
    """In bytes: the resident set's high-water mark (VmHWM), and VmRSS + VmSwap now."""

    vm_hwm_bytes: int | None
    rss_plus_swap_bytes: int | None

    def peak_bytes(self, held: int = 0) -> int | None:
        """The larger of the two, and never below `held`, the bytes known to be held: memory that was swapped out is not
        in VmHWM, and memory shared with an NPU may be in neither. None if nothing is known."""
        known = [value for value in (self.vm_hwm_bytes, self.rss_plus_swap_bytes, held or None) if value is not None]
        return max(known, default=None)


def process_memory(status: str | os.PathLike[str] = "/proc/self/status") -> ProcessMemory:
    """Reads `status`; fields that are missing, or a file that cannot be read, give None."""
    try:
        text = Path(status).read_text()
    except OSError:
        return ProcessMemory(None, None)
    fields = {
        name: int(kilobytes) << 10 for name, kilobytes in re.findall(r"^(Vm\w+):\s+(\d+) kB$", text, re.MULTILINE)
    }
    rss, swap = fields.get("VmRSS"), fields.get("VmSwap")
    return ProcessMemory(fields.get("VmHWM"), None if rss is None or swap is None else rss + swap)
