"""Reading a small file of a stranger's folder whole: a regular file of bounded size, nothing that could block.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

SMALL_BYTES = 256 << 20  # tokenizers of some tens of MiB exist
JSON_BYTES = 48 << 20  # to be parsed within seconds; the index of 200,000 tensors has less than half of it


def open_regular(path: Path) -> int:
    """A descriptor for reading. A pipe or a device is no file here: opening one could wait for ever.

    Raises OSError, with a reason that can be shown.
    """
    fd = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        mode = os.fstat(fd).st_mode
        if not stat.S_ISREG(mode):
            code = errno.EISDIR if stat.S_ISDIR(mode) else errno.EINVAL
            raise OSError(code, "Is a directory" if stat.S_ISDIR(mode) else "is not a regular file", str(path))
    except BaseException:
        os.close(fd)
        raise
    return fd


def read_small(path: Path, limit: int = SMALL_BYTES) -> bytes:
    """All bytes of a regular file of at most `limit` bytes. Raises OSError, with a reason that can be shown."""
    with open(open_regular(path), "rb") as file:
        if os.fstat(file.fileno()).st_size > limit:
            raise OSError(errno.EFBIG, f"is larger than {limit} bytes", str(path))
        return file.read(limit)
