"""`push`: a bundle's or a packed model's files on the phone, complete or absent. What is there already is not sent."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from android.client import CABLE, SPACE, DeviceError
from android.contents import Contents, PhoneFile
from android.device import Device
from android.layout import PhoneLayout
from android.lock import push_lock
from android.record import PART, PhoneFolder
from android.target import Target, fit_target
from android.transfer import SMALL, Transfer
from estream.errors import PackageError
from estream.units import format_bytes

Progress = Callable[[str, int, int], None]

_MARGIN = 64 << 20  # bytes that stay free: the record, folders, the phone's own needs
_SYNC_S = 300.0


@dataclass(frozen=True)
class PushReport:
    """Bytes that were sent, that were there already as whole files, and that an interrupted push had left.

    removed: files of earlier pushes that are no part of it any more. left_out: what the phone has no use for.
    """

    label: str
    folder: str
    files_sent: int
    bytes_sent: int
    files_skipped: int
    bytes_skipped: int
    bytes_resumed: int
    removed: int
    left_out: tuple[str, ...]
    seconds: float

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def push(device: Device, root: str, contents: Contents, progress: Progress | None = None) -> PushReport:
    """Makes the folder on the phone what `contents` says, the manifest last. Files that others put there stay.

    `progress(label, done, total)` is called with bytes.

    Raises:
        DeviceError: the connection broke (push again: it goes on there), no space, a folder that is not fit, another
            push.
        PackageError: a file here is not what its manifest says.
    """
    try:
        target = fit_target(device, root)
        with push_lock(device, root):
            return _push(device, target, contents, progress)
    except PackageError as error:
        step = f"{contents.repair}, and push again. Or remove what was sent: {contents.removal}"
        raise PackageError(error.thing, next_step=step) from error
    except DeviceError as error:
        if error.next_step != CABLE:
            raise
        step = f"{CABLE}: a push goes on where it ended"
        raise DeviceError(error.thing, asked=error.asked, had=error.had, next_step=step) from error


def _push(device: Device, target: Target, contents: Contents, progress: Progress | None) -> PushReport:
    started = time.monotonic()
    folder = PhoneFolder(device, contents.folder)
    bytecode = PhoneLayout(target.root).bytecode
    has_bytecode = any(f"{target.root}/{name}".startswith(f"{bytecode}/") for name in folder.present)
    if has_bytecode and contents.folder == target.root:
        # What Python compiled there is not verified: with a push all is as it was sent.
        device.script('rm -rf "$1"', bytecode)
    files = [*contents.files, contents.manifest]
    folder.adopt((file.path, file.nbytes, file.sha256) for file in files)
    missing = [file for file in files if not _is_there(folder, file)]
    stale = folder.pushed.keys() - {file.path for file in files}
    stale = {name for name in stale if name in folder.present}
    parts = _abandoned(folder, missing)
    _check_space(device, target.free, folder, missing, stale | parts)
    outdated = {file.path for file in missing if file.path in folder.present}
    if missing:
        # First of all: what is mixed of old and new files must not look like either.
        folder.remove({contents.manifest.path} & (folder.present.keys()))
    folder.remove((outdated | stale | parts) - {contents.manifest.path})
    missing = [file for file in files if not _is_there(folder, file)]
    total, done = sum(file.nbytes for file in missing), 0

    def sent(nbytes: int) -> None:
        nonlocal done
        done += nbytes
        if progress is not None:
            progress(contents.label, done, total)

    transfer = Transfer(folder, sent)
    if missing:
        sent(0)
        transfer.send([file for file in missing if file is not contents.manifest])
        device.shell("sync", timeout_s=_SYNC_S)
        transfer.send([contents.manifest])
    return PushReport(
        contents.label,
        contents.folder,
        len(missing),
        transfer.bytes_sent,
        len(files) - len(missing),
        contents.nbytes - total,
        transfer.bytes_resumed,
        len(stale),
        contents.left_out,
        time.monotonic() - started,
    )


def _is_there(folder: PhoneFolder, file: PhoneFile) -> bool:
    had = folder.verified.get(file.path)
    return had is not None and had.sha256 == file.sha256


def _check_space(device: Device, free: int, folder: PhoneFolder, missing: Sequence[PhoneFile], stale: set[str]) -> None:
    """Before anything is removed or sent."""
    need = sum(file.nbytes for file in missing)
    if not need:
        return
    freed = sum(folder.present[name][0] for name in stale)
    for file in missing:
        freed += folder.present.get(file.path, (0, 0))[0]
        if file.nbytes >= SMALL:
            freed += min(file.nbytes, folder.present.get(file.path + PART, (0, 0))[0])
    asked, had = need + _MARGIN, free + freed
    if had < asked:
        raise DeviceError(
            f"not enough free space on {device.serial}: need {format_bytes(asked)} ({asked} bytes), have"
            f" {format_bytes(had)} ({had} bytes)",
            next_step=SPACE,
        )


def _abandoned(folder: PhoneFolder, missing: Sequence[PhoneFile]) -> set[str]:
    """Parts of files that will not be sent any more. Under the bundle's folder are also models, with their own."""
    wanted = {file.path + PART for file in missing}
    return {
        name
        for name in folder.present
        if name.endswith(PART) and name not in wanted and not name.startswith(("models/", "runs/"))
    }
