"""What the phone says of itself: Android's properties, and the SoC they name."""

from __future__ import annotations

import re
from collections.abc import Mapping

from android.device import Device
from estream.errors import UsageError
from estream.runtime.soc import SOCS, Soc

_LINE = re.compile(r"^\[([^\]]+)\]: \[(.*)\]$", re.MULTILINE)
# ro.board.platform, where the maker writes something of its own into ro.soc.model
_PLATFORMS = {"kalama": "sm8550", "pineapple": "sm8650", "sun": "sm8750", "canoe": "sm8850"}


def read_properties(device: Device) -> dict[str, str]:
    """All properties. Raises DeviceError."""
    return dict(_LINE.findall(device.shell("getprop").out.decode(errors="replace")))


def soc_name(properties: Mapping[str, str]) -> str:
    """'SM8650 (pineapple)', or whatever is known of it."""
    model, platform = properties.get("ro.soc.model", ""), properties.get("ro.board.platform", "")
    return f"{model} ({platform})" if model and platform else model or platform or "unnamed"


def find_phone_soc(properties: Mapping[str, str]) -> Soc | None:
    """The SoC that contexts can be compiled for; None: EStream does not know it."""
    number = re.match(r"sm\d{4}", properties.get("ro.soc.model", "").lower())
    name = number[0] if number else _PLATFORMS.get(properties.get("ro.board.platform", "").lower())
    return SOCS.get(name) if name else None


def phone_soc(device: Device) -> str:
    """The name of this phone's SoC, as contexts are named. Raises UsageError: it is none of the known ones."""
    properties = read_properties(device)
    soc = find_phone_soc(properties)
    if soc is None:
        raise UsageError(
            f"the phone {device.serial} has an SoC that is not known here",
            had=soc_name(properties),
            next_step=f"Name the one to run contexts of, --soc {' or '.join(SOCS)}, or give --backend cpu",
        )
    return soc.name
