"""Which SoC a phone has, as contexts are named."""

from __future__ import annotations

from typing import TYPE_CHECKING

from android.properties import find_phone_soc, read_properties, soc_name
from estream.errors import UsageError
from estream.runtime.soc import SOCS

if TYPE_CHECKING:
    from android.adb import Device


def phone_soc(device: Device) -> str:
    """The name of `estream.runtime.soc` for this phone. Raises UsageError: it is none of the known ones."""
    properties = read_properties(device)
    soc = find_phone_soc(properties)
    if soc is None:
        raise UsageError(
            f"the phone {device.serial} has an SoC that is not known here",
            had=soc_name(properties),
            next_step=f"Name the one to run contexts of, --soc {' or '.join(SOCS)}, or give --backend cpu",
        )
    return soc.name
