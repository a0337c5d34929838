"""How warm the machine is, as the kernel tells. Where it does not, the answer is None."""

from __future__ import annotations

import contextlib
from pathlib import Path

_ZONES = Path("/sys/class/thermal")


def hottest(zones: Path = _ZONES) -> dict[str, str | float] | None:
    """The hottest thermal zone: its name, `zone`, and degrees, `celsius`."""
    found: list[tuple[float, str]] = []
    for zone in zones.glob("thermal_zone*"):
        with contextlib.suppress(OSError, ValueError):
            celsius = int((zone / "temp").read_text()) / 1000
            if 0 < celsius < 150:  # sensors that are switched off say anything
                found.append((celsius, (zone / "type").read_text().strip()))
    celsius, name = max(found, default=(0.0, ""))
    return {"zone": name, "celsius": celsius} if found else None
