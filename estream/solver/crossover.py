"""CPU or NPU of one phone, for one prompt: advice, the user decides."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from estream.errors import UsageError
from estream.package.reader import Package
from estream.solver.profile import DeviceProfile
from estream.solver.search import solve
from estream.units import format_seconds


@dataclass(frozen=True)
class Crossover:
    """Predicted seconds of a prompt of `tokens` on either."""

    tokens: int
    cpu_s: float
    npu_s: float

    @property
    def advice(self) -> str:
        """Both figures, and what follows from them."""
        step = "for this prompt --backend cpu is faster" if self.cpu_s < self.npu_s else "the NPU is faster"
        return f"{format_seconds(self.cpu_s)} predicted on the CPU, {format_seconds(self.npu_s)} on the NPU: {step}"

    def to_dict(self) -> dict[str, Any]:
        """JSON-ready."""
        return {**asdict(self), "faster": "cpu" if self.cpu_s < self.npu_s else "htp", "advice": self.advice}


def compare(
    package: Package, npu: DeviceProfile, cpu: DeviceProfile, tokens: int, *, memory: int | None = None
) -> Crossover:
    """Solves for both profiles. Raises UsageError where one is of another target, and what `solve` raises."""
    for profile, backend in ((npu, "htp"), (cpu, "cpu")):
        if profile.machine.get("backend") != backend:
            raise UsageError(
                "a CPU is compared with an NPU",
                asked=f"a profile of target {backend}",
                had=f"one of target {profile.machine.get('backend')}",
                next_step=f"estream device calibrate {package.path} --backend {backend}",
            )
    times = {
        name: solve(package, profile, tokens, memory=memory).prediction.ttft_s
        for name, profile in (("cpu_s", cpu), ("npu_s", npu))
    }
    return Crossover(tokens, **times)
