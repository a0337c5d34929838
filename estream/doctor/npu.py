"""The QNN provider, QNN's HTP back end, and the devices that they find. Needed for target htp only."""

from __future__ import annotations

from collections import Counter

from estream.doctor.child import ask
from estream.doctor.finding import Finding, missing
from estream.doctor.software import version
from estream.errors import TargetError
from estream.runtime.htp import PROVIDER, QnnLibraries, simulated

AREA = "npu"


def check_npu() -> list[Finding]:
    """Findings of this area. Libraries are loaded in child processes: one that crashes is a finding."""
    try:
        libraries = QnnLibraries.find()
    except TargetError as error:
        return [missing(AREA, "QNN provider", error, "htp")]
    found = [
        Finding(AREA, "QNN provider", "ok", f"onnxruntime-qnn {version('onnxruntime-qnn')}, {libraries.plugin}", "htp"),
    ]
    try:
        answer = ask("qnn", libraries.backend)
        said = f"QAIRT {answer['build'].lstrip('v')}, interface {answer['api']}, {libraries.backend}"
        found.append(Finding(AREA, "libQnnHtp", "ok", said, "htp"))
    except TargetError as error:
        found.append(missing(AREA, "libQnnHtp", error, "htp"))
    return [*found, _devices(libraries)]


def _devices(libraries: QnnLibraries) -> Finding:
    try:
        names = Counter(ask("devices", libraries.plugin)["devices"])
    except TargetError as error:
        return missing(AREA, "devices", error, "htp")
    listed = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(names.items()))
    if PROVIDER not in names:
        step = "Run on a Snapdragon device, or on x86-64 for the simulator"
        return Finding(AREA, "devices", "missing", f"no {PROVIDER} among {listed or 'none'}", "htp", step)
    kind = "HTP simulated on this machine: right numbers, no times" if simulated() else "a real HTP"
    return Finding(AREA, "devices", "ok", f"{kind}; {listed}", "htp")
