"""A folder that is complete or absent: built in a hidden sibling, then renamed.

Each build holds a flock on its own folder, so that the next one can tell the leftovers of a killed process from the
folder of a live one. Where the file system has no flock, leftovers are never removed.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import json
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from estream.errors import PackageError, UsageError
from estream.package.manifest import FORMAT, MODEL
from estream.small_file import JSON_BYTES, read_small
from estream.units import format_bytes

_BUILD = ".estream-packing-"  # .NAME.estream-packing-RANDOM: being built, or an old package on its way out
_ASIDE = ".estream-previous"  # .NAME.estream-previous: the old package while two renames replace it
_BUILD_NAME = re.compile(r"\..+" + re.escape(_BUILD) + r"[0-9a-f]{8}")
_AT_FDCWD = -100
_RENAME_EXCHANGE = 2


def is_package(path: Path) -> bool:
    """Whether `path` is a packed model of any version, whole or damaged: a folder whose model.json says so."""
    try:
        manifest = json.loads(read_small(path / MODEL, JSON_BYTES))
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(manifest, dict) and manifest.get("format") == FORMAT


@contextmanager
def building(out: Path, *, force: bool = False, required_bytes: int = 0) -> Iterator[Path]:
    """Yields an empty folder beside `out`; when the block ends well, that folder becomes `out`, else it is removed.

    With `force` an existing package is replaced in one step, and stays whole until then.

    Raises:
        UsageError: `out` exists without `force`, or is not a package (nobody's own folder is ever deleted).
        PackageError: the folder cannot be made or written, or has less than `required_bytes` free.
    """
    out = Path(os.path.realpath(out))
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent):
            _recover(out)
            _clean(out.parent)
            _check_target(out, force)
            _check_space(out.parent, required_bytes)
            build = out.parent / f".{out.name}{_BUILD}{secrets.token_hex(4)}"
            build.mkdir()
            lock = _try_lock(build)
    except OSError as problem:
        raise PackageError(f"{out}: cannot be created: {problem.strerror}", next_step=_next_step(problem)) from problem
    try:
        yield build
        _sync_folders(build)
        with _locked(out.parent):
            _check_target(out, force)
            _install(build, out)
            _sync(out.parent)
    except OSError as problem:
        full = problem.errno in _FULL
        reason = "no space left on the device" if full else f"packing failed: {problem.strerror or problem}"
        raise PackageError(f"{out}: {reason}", next_step=_next_step(problem)) from problem
    finally:
        # After an exchange this is the old package.
        shutil.rmtree(build, ignore_errors=True)
        if lock is not None:
            os.close(lock)


@contextmanager
def replacing(out: Path) -> Iterator[Path]:
    """The same for a folder of files that can be made again (compiled contexts): one that exists is replaced whole.

    Raises:
        PackageError: the folder cannot be made or written.
    """
    out = Path(os.path.realpath(out))
    build, lock = None, None
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        with _locked(out.parent):
            _clean(out.parent)
            build = out.parent / f".{out.name}{_BUILD}{secrets.token_hex(4)}"
            build.mkdir()
            lock = _try_lock(build)
        yield build
        _sync_folders(build)
        with _locked(out.parent):
            _install(build, out)
            _sync(out.parent)
    except OSError as problem:
        raise PackageError(f"{out}: {problem.strerror or problem}", next_step=_WRITABLE) from problem
    finally:
        if build is not None:
            shutil.rmtree(build, ignore_errors=True)
        if lock is not None:
            os.close(lock)


def _check_target(out: Path, force: bool) -> None:
    if not os.path.lexists(out):
        return
    if not is_package(out):
        raise UsageError(
            f"{out} exists and is not a packed model", next_step="Choose another name, or remove it yourself"
        )
    if not force:
        raise UsageError(f"{out} exists", next_step="Pass --force to replace it, or choose another name")


_SPACE = "Free some space, choose another disk, or a smaller scheme"
_WRITABLE = "Check the folder's permissions, the limits of this process (ulimit -f) and the disk"
_FULL = (errno.ENOSPC, errno.EDQUOT)


def _next_step(problem: OSError) -> str:
    if problem.errno == errno.ENAMETOOLONG:
        return "Choose a shorter name"
    return _SPACE if problem.errno in _FULL else _WRITABLE


def _check_space(parent: Path, required_bytes: int) -> None:
    free = shutil.disk_usage(parent).free
    if free < required_bytes:
        raise PackageError(
            f"not enough free space in {parent}: need {format_bytes(required_bytes)} ({required_bytes} bytes),"
            f" have {format_bytes(free)} ({free} bytes)",
            next_step=_SPACE,
        )


def _install(build: Path, out: Path) -> None:
    """Renames `build` to `out`. An old package at `out` ends under the name `build`, or is gone."""
    if not os.path.lexists(out):
        os.rename(build, out)
    elif not _exchange(build, out):
        aside = _aside(out)
        os.rename(out, aside)  # killed here: the next build puts it back
        try:
            os.rename(build, out)
        except OSError:
            os.rename(aside, out)
            raise
        shutil.rmtree(aside, ignore_errors=True)


def _exchange(first: Path, second: Path) -> bool:
    """Swaps two names in one step (renameat2). False where the C library or the file system cannot."""
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    if rename is None:
        return False
    names = (ctypes.c_char_p(os.fsencode(first)), ctypes.c_char_p(os.fsencode(second)))
    if rename(_AT_FDCWD, names[0], _AT_FDCWD, names[1], ctypes.c_uint(_RENAME_EXCHANGE)) == 0:
        return True
    code = ctypes.get_errno()
    if code in (errno.ENOSYS, errno.EINVAL, errno.EPERM, errno.ENOTSUP):
        return False
    raise OSError(code, os.strerror(code), str(second))


def _aside(out: Path) -> Path:
    return out.parent / f".{out.name}{_ASIDE}"


def _recover(out: Path) -> None:
    """Ends a replacement by two renames that was killed half way."""
    aside = _aside(out)
    if not is_package(aside):
        return
    if os.path.lexists(out):
        shutil.rmtree(aside, ignore_errors=True)
    else:
        os.rename(aside, out)


def _clean(parent: Path) -> None:
    """Removes what killed builds left in `parent`, of whatever package."""
    for entry in os.scandir(parent):
        if not _BUILD_NAME.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
            continue
        lock = _try_lock(parent / entry.name)
        if lock is not None:
            shutil.rmtree(parent / entry.name, ignore_errors=True)
            os.close(lock)


def _try_lock(folder: Path) -> int | None:
    """An exclusive flock, held until the descriptor is closed or the process dies; None if it cannot be had."""
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        os.close(fd)
        return None
    return fd


@contextmanager
def _locked(parent: Path) -> Iterator[None]:
    """Keeps another build from looking at `parent` between our mkdir and our lock, or between our two renames."""
    fd = os.open(parent, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        try:
            fcntl.flock(fd, fcntl.LOCK_EX)
        except OSError as problem:
            if problem.errno not in (errno.ENOTSUP, errno.ENOLCK, errno.ENOSYS, errno.EBADF, errno.EINVAL):
                raise
        yield
    finally:
        os.close(fd)


def _sync_folders(root: Path) -> None:
    for folder, _, _ in os.walk(root):
        _sync(Path(folder))


def _sync(folder: Path) -> None:
    fd = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)
