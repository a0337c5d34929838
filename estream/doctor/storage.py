"""The storage under a folder: file system, space, direct reads and their rate."""

from __future__ import annotations

import os
import re
import shutil
import tempfile
import time
from dataclasses import dataclass
from pathlib import Path, PurePath

from estream.doctor.finding import Finding
from estream.errors import EStreamError
from estream.flash.pool import PoolFile
from estream.flash.ranges import PIECE, load_ranges
from estream.package.layout import ALIGNMENT
from estream.runtime.memory import HostMemory
from estream.units import format_bytes, format_rate

AREA = "storage"
SAMPLE = 64 << 20  # bytes of the quick read
_LANES = 2


def check_storage(folder: Path, file: Path | None = None) -> list[Finding]:
    """Findings of this area. file: a large file there; None: a temporary one is written, read and removed."""
    space = shutil.disk_usage(folder)
    found = [
        Finding(AREA, "folder", "ok", f"{folder.resolve()}, {file_system(folder)}"),
        Finding(AREA, "free space", "ok", f"{format_bytes(space.free)} of {format_bytes(space.total)}"),
    ]
    if file is not None:
        return [*found, *_reads(file)]
    if space.free < 2 * SAMPLE:
        step = "Free some space, or name a package"
        return [*found, Finding(AREA, "direct reads", "warning", "not tried: too little space", "cpu", step)]
    try:
        with tempfile.NamedTemporaryFile(prefix=".estream-doctor-", dir=folder) as sample:
            block = os.urandom(1 << 20)
            for _ in range(SAMPLE // len(block)):
                sample.write(block)
            sample.flush()
            os.fsync(sample.fileno())
            return [*found, *_reads(Path(sample.name))]
    except OSError as error:
        step = "Name a package, or run doctor in a folder that can be written to"
        return [*found, Finding(AREA, "direct reads", "warning", f"not tried: {error.strerror}", "cpu", step)]


def _reads(file: Path) -> list[Finding]:
    """One pass over the first SAMPLE bytes."""
    memory = HostMemory()
    try:
        with PoolFile.open(file) as pool:
            nbytes = min(pool.nbytes, SAMPLE) // ALIGNMENT * ALIGNMENT
            if nbytes == 0:
                return [Finding(AREA, "direct reads", "warning", f"not tried: {file.name} is too small")]
            buffer = memory.allocate(nbytes, "sample")
            pieces = [(buffer.part(at, min(PIECE, nbytes - at)), at) for at in range(0, nbytes, PIECE)]
            buffer.memory()[::4096] = bytes(-(-nbytes // 4096))  # committed before the clock runs
            started = time.perf_counter()
            load_ranges(pool, pieces, lanes=_LANES)
            rate = nbytes / max(time.perf_counter() - started, 1e-9)
    except EStreamError as error:
        return [Finding(AREA, "direct reads", "missing", error.thing, next_step=error.next_step)]
    finally:
        memory.close()
    if pool.direct:
        direct = Finding(AREA, "direct reads", "ok", "work")
    else:
        step = "Reads go through the page cache and compete for memory; put the package on ext4, f2fs or xfs"
        direct = Finding(AREA, "direct reads", "warning", f"do not work: {pool.direct_reason}", "cpu", step)
    told = f"{format_rate(rate)} over {format_bytes(nbytes)} in {_LANES} lanes"
    told += ", once" if pool.direct else ", buffered: perhaps from memory"
    return [direct, Finding(AREA, "read rate", "ok", told)]


@dataclass(frozen=True)
class Mount:
    """place: mount point. kind: `ext4`, `f2fs`, `fuse`, ..."""

    place: str
    kind: str
    options: frozenset[str]


def find_mount(text: str, place: PurePath) -> Mount | None:
    """Of the lines of a mountinfo, the last mount with the longest path that holds `place`; None: there is none."""
    best: Mount | None = None
    for line in text.splitlines():
        left, _, right = line.partition(" - ")
        words, kinds = left.split(), right.split()
        if len(words) < 6 or not kinds:
            continue
        mount = re.sub(r"\\([0-7]{3})", lambda octal: chr(int(octal[1], 8)), words[4])
        if place.is_relative_to(mount) and (best is None or len(mount) >= len(best.place)):
            best = Mount(mount, kinds[0], frozenset(words[5].split(",")))
    return best


def file_system(folder: Path, mounts: Path = Path("/proc/self/mountinfo")) -> str:
    """'ext4 on /data'; 'file system unknown' where the system hides it."""
    try:
        mount = find_mount(mounts.read_text(errors="replace"), folder.resolve())
    except OSError:
        mount = None
    return "file system unknown" if mount is None else f"{mount.kind} on {mount.place}"
