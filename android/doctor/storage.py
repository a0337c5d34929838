"""The folder that everything goes to: file system, space, direct reads."""

from __future__ import annotations

from android.client import DeviceError
from android.device import Device
from android.doctor.phone import denied
from android.target import HOME, look_at
from estream.doctor.finding import Finding
from estream.units import format_bytes

AREA = "storage"
_LITTLE = 1 << 30
# A file of 256 KiB, read both ways; direct reads come in whole 4 KiB blocks.
_SAMPLE = """d=$1; made=
[ -d "$d" ] || { mkdir -p "$d" && made=1; } || exit 3
f="$d/.estream-doctor-$$"
trap 'rm -f "$f" "$f.read"; [ -z "$made" ] || rmdir "$d" 2>/dev/null' EXIT
dd if=/dev/urandom of="$f" bs=65536 count=4 2>/dev/null && sync || exit 3
chmod 700 "$f" && [ -x "$f" ] || exit 4
sha256sum < "$f"
dd if="$f" iflag=direct bs=65536 2>/dev/null > "$f.read" && sha256sum < "$f.read" && exit
dd if="$f" iflag=direct bs=65536 of=/dev/null
"""


def check_storage(device: Device, root: str) -> list[Finding]:
    """Findings of this area."""
    try:
        target = look_at(device, root)
    except DeviceError as error:
        if error.status is None:
            raise
        return [Finding(AREA, "folder", "missing", error.thing, next_step=error.next_step or HOME)]
    found = f"{root}, {target.kind} on {target.mount}"
    if target.fault is not None:
        return [Finding(AREA, "folder", "missing", f"{root}: {target.fault}", next_step=HOME)]
    space = f"{format_bytes(target.free)} of {format_bytes(target.total)}"
    if target.free < _LITTLE:
        step = "Free some space: packages have some GiB"
        free = Finding(AREA, "free space", "warning", space, "cpu", step)
    else:
        free = Finding(AREA, "free space", "ok", space)
    return [*_sample(device, root, found), free]


def _sample(device: Device, root: str, found: str) -> list[Finding]:
    """Whether the folder can be written to, and whether a direct read gives the bytes of a buffered one."""
    done = device.script(_SAMPLE, root, check=False)
    if done.status in (3, 4) and not done.out:
        what = "cannot be written to" if done.status == 3 else "holds no programs"
        reason = denied(done.err) or done.err.decode(errors="replace").strip()[-300:] or "no reason given"
        return [Finding(AREA, "folder", "missing", f"{root} {what}: {reason}", next_step=HOME)]
    folder = Finding(AREA, "folder", "ok", found)
    sums = [word for word in done.out.decode(errors="replace").split() if len(word) == 64]
    if len(sums) == 2 and sums[0] == sums[1]:
        return [folder, Finding(AREA, "direct reads", "ok", "work")]
    step = "Reads go through the page cache and compete for memory; keep models on ext4 or f2fs"
    if len(sums) == 2:
        return [folder, Finding(AREA, "direct reads", "warning", "return other bytes than buffered ones", "cpu", step)]
    said = done.err.decode(errors="replace").strip().splitlines()
    reason = denied(done.err) or (said[0] if said else "no reason given")
    if "iflag" in reason or "direct" in reason.rpartition(":")[2]:
        # An old dd: the bundle's Python tries it by itself.
        return [folder, Finding(AREA, "direct reads", "ok", "not tried by dd, which has no direct reads on this phone")]
    return [folder, Finding(AREA, "direct reads", "warning", f"do not work: {reason}", "cpu", step)]
