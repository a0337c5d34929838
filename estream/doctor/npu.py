"""The QNN provider, QNN's HTP back end, and the devices that they find. Needed for target htp only."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

from estream.doctor.child import ask
from estream.doctor.finding import Finding, missing
from estream.doctor.software import version
from estream.errors import TargetError
from estream.runtime.htp import PROVIDER, QnnLibraries, simulated

AREA = "npu"
RPC_LIBRARY = "libcdsprpc.so"


def check_npu(folder: Path | None = None) -> list[Finding]:
    """Findings of this area. Libraries are loaded in child processes: one that crashes is a finding. folder: where they
    lie on a phone; None: the installed packages'."""
    try:
        libraries = QnnLibraries.find(folder)
    except TargetError as error:
        return [missing(AREA, "QNN provider", error, "htp")]
    found = [Finding(AREA, "QNN provider", "ok", _named(libraries, folder), "htp")]
    if folder is not None:
        found.append(_rpc())
    try:
        answer = ask("qnn", libraries.backend)
        said = f"QAIRT {answer['build'].lstrip('v')}, interface {answer['api']}, {libraries.backend}"
        found.append(Finding(AREA, "libQnnHtp", "ok", said, "htp"))
    except TargetError as error:
        found.append(missing(AREA, "libQnnHtp", error, "htp"))
    return [*found, _devices(libraries, folder)]


def _named(libraries: QnnLibraries, folder: Path | None) -> str:
    known = "" if folder is not None else f"onnxruntime-qnn {version('onnxruntime-qnn')}, "
    return f"{known}{libraries.plugin}"


def _rpc() -> Finding:
    """The library that carries calls to the DSP is the phone's own."""
    try:
        ask("library", RPC_LIBRARY)
    except TargetError as error:
        step = "Without it no program here reaches the NPU: the phone lacks it, or keeps it from adb's shell"
        return Finding(AREA, RPC_LIBRARY, "missing", error.thing, "htp", step)
    return Finding(AREA, RPC_LIBRARY, "ok", "loads", "htp")


def _devices(libraries: QnnLibraries, folder: Path | None) -> Finding:
    try:
        names = Counter(ask("devices", libraries.plugin, *filter(None, [folder]))["devices"])
    except TargetError as error:
        return missing(AREA, "devices", error, "htp")
    listed = ", ".join(f"{name} ({count})" if count > 1 else name for name, count in sorted(names.items()))
    if PROVIDER not in names:
        step = "Run on a Snapdragon device, or on x86-64 for the simulator"
        return Finding(AREA, "devices", "missing", f"no {PROVIDER} among {listed or 'none'}", "htp", step)
    kind = "HTP simulated on this machine: right numbers, no times" if simulated() else "a real HTP"
    return Finding(AREA, "devices", "ok", f"{kind}; {listed}", "htp")
