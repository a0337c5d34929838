"""Which phones there are, and the one that is meant."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from dataclasses import dataclass, field

from android.client import ALLOW, REPLUG, Client, Completed, DeviceError, find_adb, last_lines
from android.device import Device
from android.process import PhoneProcess

__all__ = ["Attached", "Completed", "Device", "DeviceError", "PhoneProcess", "choose_device", "parse_devices"]

_LIST_S = 20.0
_STATES = r"device|offline|unauthorized|authorizing|connecting|no permissions|recovery|rescue|sideload|bootloader|host"
_LINE = re.compile(rf"(?P<serial>\S.*?)\s+(?P<state>{_STATES})\b(?P<rest>.*)")
_DETAIL = re.compile(r"(\w+):(\S+)")
_ENABLE = (
    "On the phone: Settings, About phone, tap 'Build number' seven times, then Developer options, 'USB debugging'; use"
    " a cable that carries data (docs/phone.md)"
)
_STEPS = {
    "unauthorized": ("has not allowed this computer", ALLOW),
    "authorizing": ("has not allowed this computer yet", ALLOW),
    "offline": ("is offline: it is attached but does not answer", REPLUG),
    "connecting": ("is still connecting", "Wait some seconds, then run the command again"),
    "no permissions": (
        "may not be opened by this user: no permissions",
        "Install the udev rules (in Debian and Ubuntu: apt install android-sdk-platform-tools-common), join the group"
        " plugdev, log in again, and plug the phone in again",
    ),
}


@dataclass(frozen=True)
class Attached:
    """One line of `adb devices -l`. state: `device` (usable) and others. details: model, product, transport_id, ..."""

    serial: str
    state: str
    details: dict[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        model = self.details.get("model")
        return f"{self.serial} ({f'{model}, ' if model else ''}{self.state})"


def choose_device(serial: str | None = None) -> Device:
    """The phone of this serial number; None: that of $ANDROID_SERIAL, or the only one.

    Raises DeviceError: no adb; no phone, several, none of this serial number; or it is not allowed, offline, and so on.
    """
    client = Client(find_adb())
    client.start_server()
    done = client.run(["devices", "-l"], _LIST_S)
    if done is None or done.status:
        had = "no answer" if done is None else last_lines(done.err + done.out)
        raise DeviceError("adb devices failed", had=had, next_step="Run adb kill-server, then again")
    chosen = _choose(parse_devices(done.out.decode(errors="surrogateescape")), serial)
    return Device(client, chosen.serial, chosen.details)


def parse_devices(text: str) -> list[Attached]:
    """What `adb devices -l` printed."""
    lines = text.partition("List of devices attached")[2].splitlines()
    found = []
    for line in lines:
        match = _LINE.fullmatch(line.strip())
        if match:
            found.append(Attached(match["serial"], match["state"], dict(_DETAIL.findall(match["rest"]))))
    return found


def _choose(attached: Sequence[Attached], serial: str | None) -> Attached:
    named = serial or os.environ.get("ANDROID_SERIAL") or None
    source = "--serial" if serial else "ANDROID_SERIAL"
    listed = ", ".join(map(str, attached))
    if not attached:
        raise DeviceError("no phone is attached", asked=named, next_step=_ENABLE)
    if named is not None:
        matching = [one for one in attached if one.serial == named]
        if not matching:
            raise DeviceError(
                f"no phone has this serial number ({source})", asked=named, had=listed, next_step="Name one of these"
            )
        return _usable(matching[0])
    usable = [one for one in attached if one.state == "device"]
    if len(attached) > 1:
        # Also where only one is usable: the other may be the one that was meant.
        step = f"Name one: --serial {(usable or attached)[0].serial}"
        raise DeviceError("several phones are attached", had=listed, next_step=step)
    return _usable(attached[0])


def _usable(one: Attached) -> Attached:
    if one.state == "device":
        return one
    other = (f"is in the state '{one.state}', not in Android", "Start Android on it, then run the command again")
    problem, step = _STEPS.get(one.state, other)
    raise DeviceError(f"the phone {one.serial} {problem}", next_step=step)
