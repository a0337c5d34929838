"""An output file that is complete or absent: written under a temporary name beside it, then renamed.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import os
import secrets
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estream.errors import UsageError


def output_target(path: str | os.PathLike[str]) -> Path:
    """The file that writing to `path` replaces: what symbolic links lead to, so that they stay links.

    Raises:
        UsageError: there is something that is not a regular file, such as a folder, a pipe or a device.
        OSError: a folder on the way cannot be searched.
    """
    try:
        # Before the name is resolved: /dev/stdout leads to a name that exists nowhere.
        mode = os.stat(path).st_mode
    except FileNotFoundError:
        mode = stat.S_IFREG
    if stat.S_ISDIR(mode):
        raise UsageError(f"{os.fspath(path)} is a folder", next_step="Name a file")
    if not stat.S_ISREG(mode):
        raise UsageError(f"{os.fspath(path)} is not a regular file", next_step="Name a file that may be replaced")
    return Path(os.path.realpath(path))


class WholeFile:
    """`file`: the descriptor to write to, until `commit` or `discard` ends it.

    Raises UsageError as `output_target`, and OSError, which names `path` and not the temporary name.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._target = output_target(path)
        # Not made from the file's name, which may be as long as names can be.
        self._part = self._target.with_name(f".estream-{os.getpid()}-{secrets.token_hex(4)}.part")
        with self.errors():
            self.file = os.open(self._part, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)

    @contextmanager
    def errors(self) -> Iterator[None]:
        """Lets every OSError name `path`."""
        try:
            yield
        except OSError as error:
            raise OSError(error.errno, error.strerror, str(self.path)) from error

    def write(self, data: bytes | memoryview, offset: int = 0) -> None:
        """All of `data` at `offset`: pwrite may write less than asked."""
        view = memoryview(data)
        with self.errors():
            while view:
                written = os.pwrite(self.file, view, offset)
                view, offset = view[written:], offset + written

    def commit(self) -> None:
        """The file appears under its name."""
        try:
            with self.errors():
                os.close(self.file)
                os.replace(self._part, self._target)
        finally:
            self._part.unlink(missing_ok=True)

    def discard(self) -> None:
        """Nothing is left behind."""
        os.close(self.file)
        self._part.unlink(missing_ok=True)


def write_whole(path: str | os.PathLike[str], content: str | bytes) -> None:
    """Writes the whole content, text in UTF-8, or nothing. Raises as `WholeFile`."""
    output = WholeFile(path)
    try:
        output.write(content.encode() if isinstance(content, str) else content)
    except BaseException:
        output.discard()
        raise
    output.commit()
