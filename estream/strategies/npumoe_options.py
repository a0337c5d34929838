"""What a user chooses of `npumoe`: `--calibration` and what goes with it, `npumoe=` of Engine."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import dataclass, fields

from estream.errors import UsageError


@dataclass(frozen=True)
class NpuMoeOptions:
    """calibration: a file of `estream calibrate-experts`. tiers: sizes of static graphs. capacity_quantile: the share
    of windows whose load an expert's capacity holds. unlimited: what exceeds a capacity is computed in further calls,
    not dropped. group_experts: experts per dispatch, None: 4 on cpu, the ladder's slots on htp. cold_below: experts
    chosen for a smaller share of the tokens run on the processor."""

    calibration: str
    tiers: int = 4
    capacity_quantile: float = 0.9
    unlimited: bool = False
    group_experts: int | None = None
    cold_below: float = 0.0

    @classmethod
    def of(cls, given: Mapping[str, object]) -> NpuMoeOptions:
        """Raises UsageError naming the option that cannot be meant."""
        known = [field.name for field in fields(cls)]
        unknown = [name for name in given if name not in known]
        if unknown or "calibration" not in given:
            raise UsageError(
                f"npumoe: unknown option {unknown[0]}" if unknown else "npumoe: no calibration", had=", ".join(known)
            )
        chosen: dict[str, object] = {name: value for name, value in given.items() if value is not None}
        options = cls(**chosen)  # type: ignore[arg-type]
        if not isinstance(options.calibration, str | os.PathLike):
            raise UsageError("--calibration must be the name of a file", asked=repr(options.calibration))
        for name, count in (("--tiers", options.tiers), ("--group-experts", options.group_experts)):
            if count is not None and (type(count) is not int or not 1 <= count <= 64):
                raise UsageError(f"{name} must be a whole number, 1 to 64", asked=repr(count))
        for name, share in (("--capacity-quantile", options.capacity_quantile), ("--cold-below", options.cold_below)):
            if not isinstance(share, float | int) or not math.isfinite(share) or not 0 <= share <= 1:
                raise UsageError(f"{name} must be a number from 0 to 1", asked=repr(share))
        if options.unlimited and "capacity_quantile" in chosen:
            raise UsageError("--capacity unlimited and --capacity-quantile exclude each other")
        return options
