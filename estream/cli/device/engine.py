"""What the commands that open an engine on the phone share."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from android.adb import Device

BACKEND = "htp"  # what a phone is for; --backend cpu is the way out


def phone_options(options: dict[str, Any], device: Device) -> dict[str, Any]:
    """Options of an engine there: on the NPU, the phone's own SoC unless another was named."""
    from android.properties import phone_soc

    if options["backend"] == "htp" and options.get("soc") is None:
        return {**options, "soc": phone_soc(device)}
    return options


def advice(args: argparse.Namespace, package: Any, serial: str, tokens: int) -> Any | None:
    """CPU against NPU where both were measured on this phone, and the NPU is about to be used; else None."""
    from android.calibrate import kept_profile
    from estream.cache import cache_folder
    from estream.errors import EStreamError
    from estream.solver.crossover import compare

    npu, cpu = (kept_profile(serial, backend, cache_folder()) for backend in ("htp", "cpu"))
    if args.backend != "htp" or npu is None or cpu is None:
        return None
    try:
        return compare(package, npu, cpu, tokens, memory=args.memory)
    except EStreamError:  # not measured for such a package, or no room in the budget: the run itself says what is wrong
        return None
