"""Which SoC a phone has, as contexts are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from estream.errors import UsageError
from estream.runtime.soc import SOCS

if TYPE_CHECKING:
    from android.adb import Device


def phone_soc(device: Device) -> str:
    """The name of `estream.runtime.soc` for this phone. Raises UsageError: it is none of the known ones."""
    said = device.shell("getprop", "ro.soc.model").out.decode(errors="replace").strip()
    name = said.lower().partition("-")[0]
    if name not in SOCS:
        raise UsageError(
            f"the phone {device.serial} has an SoC that is not known here",
            had=said or "no name",
            next_step=f"Name the one to run contexts of, --soc {' or '.join(SOCS)}, or give --backend cpu",
        )
    return name
