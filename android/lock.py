"""One push to a folder of a phone at a time: two would write the same files."""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from contextlib import contextmanager

from android.client import DeviceError, failed
from android.device import Device

LOCK = ".estream-push"
_HELD = 75
# A shell holds it until its stdin ends, which a killed push and a pulled cable do, too. After a restart of the phone
# nothing runs that has the number in `pid`.
_HOLD = """mkdir -p "${1%/*}" || exit 1
if [ -d "$1" ]; then
  [ -s "$1/pid" ] || sleep 1
  kill -0 "$(cat "$1/pid" 2>/dev/null)" 2>/dev/null && exit 75
  rm -rf "$1"
fi
mkdir "$1" || { [ -d "$1" ] && exit 75; exit 1; }
trap 'rm -rf "$1"; rmdir "${1%/*}" 2>/dev/null' EXIT
trap 'exit 1' HUP INT TERM
echo $$ > "$1/pid" || exit 1
echo held
while read -r line; do :; done"""


@contextmanager
def push_lock(device: Device, root: str) -> Iterator[None]:
    """Holds the lock of `root`, which is made, while the block lasts. Raises DeviceError: another push has it."""
    place = f"{root}/{LOCK}"
    with device.stream("sh", "-c", _HOLD, "sh", place, label="push") as holder:
        if next(holder.lines(), None) != b"held":
            status = holder.finish()
            clear = f"adb -s {device.serial} shell rm -r {shlex.quote(place)}"
            if status == _HELD:
                raise DeviceError(
                    f"another push to {root} on {device.serial} is going on",
                    next_step=f"Wait for its end. If there is none: {clear}",
                )
            raise failed("push", device.serial, status, holder.err)
        yield
