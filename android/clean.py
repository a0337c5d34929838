"""`clean`: removes what EStream put on the phone, and nothing else."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any

from android.client import DeviceError
from android.device import Device
from android.layout import PhoneLayout
from android.lock import LOCK
from android.record import RECORD, STAGING
from estream.errors import UsageError

SAFE = "/data/local/tmp"
_REMOVE_S = 600.0
# What there is of the arguments, with its size in KiB, `du` names it as it was given.
_SIZES = 'for name in "$@"; do if [ -e "$name" ] || [ -L "$name" ]; then du -sk "$name" || exit 1; fi; done'
_REAL = 'readlink -f "$1"; readlink -f "$2"'


@dataclass(frozen=True)
class Removed:
    """paths on the phone, and the bytes they take."""

    paths: tuple[str, ...]
    bytes: int
    dry_run: bool

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return asdict(self)


def clean(
    device: Device,
    layout: PhoneLayout,
    *,
    models: Sequence[str] = (),
    all_models: bool = False,
    runs: bool = False,
    everything: bool = False,
    dry_run: bool = False,
) -> Removed:
    """Removes the named models, all models, what runs left, or all that EStream put under the root.

    Raises:
        UsageError: the root is not below /data/local/tmp, also by way of a link; a name that is no name of a folder.
        DeviceError: no such model, or the phone refused.
    """
    _check_root(device, layout.root)
    paths = [f"{layout.models}/{_checked(name)}" for name in models]
    if all_models:
        paths.append(layout.models)
    if runs:
        paths.append(layout.runs)
    if everything:
        own = (
            layout.models,
            layout.runs,
            layout.python,
            layout.libraries,
            layout.app,
            layout.bytecode,
            layout.manifest,
        )
        paths = [*own, *(f"{layout.root}/{name}" for name in (RECORD, STAGING, LOCK))]
    found = _sizes(device, paths)
    absent = [name for name in models if f"{layout.models}/{name}" not in found]
    if absent:
        had = ", ".join(models_on(device, layout)) or "none"
        raise DeviceError(f"no such model on {device.serial}", asked=", ".join(absent), had=had)
    if not dry_run:
        if found:
            device.script('rm -rf -- "$@"', *found, timeout_s=_REMOVE_S)
        if everything:
            device.script('rmdir "$1" 2>/dev/null || true', layout.root)
    return Removed(tuple(found), sum(found.values()), dry_run)


def models_on(device: Device, layout: PhoneLayout) -> list[str]:
    """Names of the folders of models, complete or not. Raises DeviceError."""
    listed = 'cd "$1" 2>/dev/null || exit 0; for name in *; do [ -d "$name" ] && printf "%s\\0" "$name"; done; true'
    names = device.script(listed, layout.models).out.split(b"\0")
    return [name.decode(errors="surrogateescape") for name in names if name]


def _checked(name: str) -> str:
    if not name or name in (".", "..") or "/" in name or "\0" in name:
        raise UsageError(f"{name!r} is no name of a model on the phone", next_step="Give the name of its folder alone")
    return name


def _check_root(device: Device, root: str) -> None:
    """A folder below /data/local/tmp, and one that is there in truth: a link could lead anywhere."""
    places = [PurePosixPath(root)]
    real = device.script(_REAL, root, SAFE, check=False).out.decode(errors="surrogateescape").splitlines()
    bases = [PurePosixPath(SAFE), PurePosixPath(real[1] if len(real) == 2 else SAFE)]
    if len(real) == 2:
        places.append(PurePosixPath(real[0]))
    for place, base in zip(places, bases, strict=False):
        if place == base or not place.is_relative_to(base):
            raise UsageError(
                "clean removes files below /data/local/tmp only",
                asked=place,
                next_step="Remove this folder yourself, with adb shell",
            )


def _sizes(device: Device, paths: Sequence[str]) -> dict[str, int]:
    """Bytes by path, of those that exist."""
    found: dict[str, int] = {}
    for path in paths:
        said = device.script(_SIZES, path).out.split(None, 1)
        if said:
            found[path] = int(said[0]) << 10
    return found
