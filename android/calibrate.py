"""Measures a phone; the profile is kept on the host, by phone and target."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from android.layout import PhoneLayout
from android.session import Listener, ask, request_of
from estream.errors import EStreamError
from estream.solver.profile import DeviceProfile

if TYPE_CHECKING:
    from android.adb import Device


def calibrate(
    device: Device,
    layout: PhoneLayout,
    package: Path,
    options: Mapping[str, Any],
    listener: Listener | None = None,
) -> tuple[DeviceProfile, dict[str, Any]]:
    """(profile, what was measured on). options: backend, soc, threads. Raises as `ask`, ProfileError."""
    answer = ask(device, layout, "calibrate", request_of(layout, package, options), listener)
    profile = DeviceProfile.from_dict(answer.fields.get("profile"), "what the phone sent")
    return profile, answer.device(device.serial)


def profile_path(serial: str, backend: str, cache: Path) -> Path:
    """Where the host keeps the profile of a phone's target."""
    return cache / "profiles" / f"phone-{re.sub(r'[^A-Za-z0-9.]', '_', serial)}-{backend}.json"


def kept_profile(serial: str, backend: str, cache: Path) -> DeviceProfile | None:
    """The profile that was kept; None if there is none, or it cannot be read."""
    try:
        return DeviceProfile.read(profile_path(serial, backend, cache))
    except (OSError, EStreamError):
        return None
