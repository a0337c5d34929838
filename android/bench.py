"""Several prefills on the phone, and what they have in common."""

from __future__ import annotations

import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from android.events import Measurement, ProtocolError
from android.layout import PhoneLayout
from android.session import Listener, ask, request_of

if TYPE_CHECKING:
    from android.adb import Device

SEED = 0  # of the random prompts


@dataclass(frozen=True)
class Cell:
    """Prompts of one length. Times of prefill in seconds: median, shortest, longest. bubble_rate: median, or None.
    temperature_c: hottest zone before the first and after the last, where the phone tells. measurements: all of them.
    """

    tokens: int
    ttft_s: float
    least_s: float
    most_s: float
    bubble_rate: float | None
    temperature_c: tuple[float | None, float | None]
    measurements: tuple[Measurement, ...]

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.ttft_s

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "tokens_per_s": self.tokens_per_s}


def bench(
    device: Device,
    layout: PhoneLayout,
    package: Path,
    tokens: Sequence[int],
    rounds: int,
    options: Mapping[str, Any],
    listener: Listener | None = None,
) -> tuple[list[Cell], dict[str, Any], dict[str, Any]]:
    """(cells by length, configuration, what was measured on). One prefill of each length per round, in turn.

    Raises as `android.session.ask`.
    """
    lengths = list(dict.fromkeys(tokens))
    measured: list[Measurement] = []
    request = {**request_of(layout, package, options), "tokens": lengths, "rounds": rounds, "seed": SEED}
    told = listener or Listener()
    answer = ask(device, layout, "bench", request, Listener(told.progress, told.opened, measured.append))
    cells = [_cell(length, [one for one in measured if one.tokens == length], rounds) for length in lengths]
    return cells, answer.fields["configuration"], answer.device(device.serial)


def _cell(tokens: int, measured: list[Measurement], rounds: int) -> Cell:
    if len(measured) != rounds:
        raise ProtocolError(f"measurements of {tokens} tokens", asked=rounds, had=len(measured))
    times = [float(one.stats["ttft_s"]) for one in measured]
    bubbles = [one.stats["bubble_rate"] for one in measured if one.stats["bubble_rate"] is not None]
    return Cell(
        tokens,
        statistics.median(times),
        min(times),
        max(times),
        statistics.median(bubbles) if bubbles else None,
        (_celsius(measured[0].temperature["before"]), _celsius(measured[-1].temperature["after"])),
        tuple(measured),
    )


def _celsius(zone: Mapping[str, Any] | None) -> float | None:
    return None if zone is None else float(zone["celsius"])
