"""The folder on the phone that everything goes to: is it fit, and how much room is there?"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import PurePosixPath

from android.client import DeviceError
from android.device import Device
from android.layout import ROOT
from estream.doctor.storage import find_mount
from estream.errors import UsageError

# The nearest folder that exists, its free space, and all mounts.
_LOOK = """d=$1
while [ ! -d "$d" ]; do d=${d%/*}; [ -n "$d" ] || d=/; done
cd "$d" && pwd -P && df -kP . && cat /proc/self/mountinfo"""
_DF = re.compile(r"\s(\d+)\s+(\d+)\s+(\d+)\s+(?:\d+%|-)\s")
_SHARED = ("fuse", "fuseblk", "sdcardfs", "esdfs", "vfat", "exfat")
HOME = f"Leave --target out: {ROOT} is the place"


@dataclass(frozen=True)
class Target:
    """free, total: bytes. fault: why nothing can be kept or run there; None: it can."""

    root: str
    mount: str
    kind: str
    free: int
    total: int
    fault: str | None


def check_root(root: str) -> str:
    """The folder without trailing or doubled slashes. Raises UsageError: not absolute, or `..` in it."""
    path = PurePosixPath(root)
    if not path.is_absolute() or ".." in path.parts or "\0" in root:
        raise UsageError("must be an absolute path on the phone, without ..", asked=root)
    return re.sub(r"^/+", "/", str(path))


def look_at(device: Device, root: str) -> Target:
    """Looks at `root`, or at the nearest folder above it that exists. Changes nothing. Raises DeviceError."""
    text = device.script(_LOOK, root).out.decode(errors="surrogateescape")
    place, _, rest = text.partition("\n")
    sizes = _DF.search(rest)
    if sizes is None:
        raise DeviceError(f"df on {device.serial} cannot be read", had=rest[:200] or "nothing")
    mount = find_mount(rest, PurePosixPath(place))
    name, kind, options = (
        ("?", "unknown", frozenset[str]()) if mount is None else (mount.place, mount.kind, mount.options)
    )
    fault = None
    if kind.partition(".")[0] in _SHARED:
        fault = (
            f"{kind} on {name} is shared storage: no programs run there, and direct reads return wrong bytes or fail"
        )
    elif "noexec" in options:
        fault = f"{kind} on {name} is mounted noexec: no programs run there"
    elif "ro" in options:
        fault = f"{kind} on {name} is mounted read-only"
    return Target(root, name, kind, int(sizes[3]) << 10, int(sizes[1]) << 10, fault)


def fit_target(device: Device, root: str) -> Target:
    """`look_at`, and refuses what is not fit. Raises DeviceError."""
    target = look_at(device, root)
    if target.fault is not None:
        raise DeviceError(f"{root} on {device.serial}: {target.fault}", next_step=HOME)
    return target
