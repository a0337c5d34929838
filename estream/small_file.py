"""Reading a small file of a stranger's folder whole: a regular file of bounded size, nothing that could block.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import errno
import json
import os
import stat
from pathlib import Path
from typing import Any

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


def read_json(path: Path) -> Any:
    """The value of a JSON file of at most JSON_BYTES. Raises OSError as `read_small`; ValueError, in words that can be
    shown."""
    content = read_small(path, JSON_BYTES)
    try:
        return json.loads(content)
    except UnicodeDecodeError:
        raise ValueError("not UTF-8 text") from None
    except json.JSONDecodeError as problem:
        raise ValueError(f"not valid JSON: {problem.msg} in line {problem.lineno}, column {problem.colno}") from None
    except ValueError:  # int() takes no more digits
        raise ValueError("not valid JSON: a number of too many digits") from None
    except RecursionError:
        raise ValueError("not valid JSON: nested too deeply") from None
