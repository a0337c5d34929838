"""What a phone itself must have for its NPU to be used from adb: FastRPC's library and device, and the DSP's files."""

from __future__ import annotations

from collections.abc import Sequence

from android.device import Device
from android.doctor.phone import denied
from android.layout import PhoneLayout
from estream.doctor.finding import Finding
from estream.runtime.soc import Soc

AREA = "npu"
_RPC = ("/vendor/lib64/libcdsprpc.so", "/system/vendor/lib64/libcdsprpc.so", "/odm/lib64/libcdsprpc.so")
_DSP_FOLDERS = ("/vendor/dsp/cdsp", "/vendor/dsp", "/dsp/cdsp", "/vendor/lib/rfsa/adsp")
_SHELL, _UNSIGNED = "fastrpc_shell_3", "fastrpc_shell_unsigned_3"
_NODES = ("/dev/fastrpc-cdsp", "/dev/fastrpc-cdsp-secure", "/dev/adsprpc-smd", "/dev/adsprpc-smd-secure")
_TRY = "The DSP may read it all the same: try a run"
_CPU = "The NPU cannot be used on this phone: run with --backend cpu"
_EXISTING = 'for name in "$@"; do [ -e "$name" ] && echo "$name"; done; true'
_READABLE = 'for name in "$@"; do [ -r "$name" ] && echo "$name"; done; true'


def check_npu(device: Device, layout: PhoneLayout, soc: Soc | None) -> list[Finding]:
    """Findings of this area, all needed for htp only."""
    return [_rpc(device), _node(device), *_dsp(device), *_libraries(device, layout, soc)]


def _rpc(device: Device) -> Finding:
    found, refused = _listed(device, _RPC)
    if not found and refused:
        step = "The bundle's Python tries to load it: push the bundle, then run doctor again"
        return Finding(AREA, "libcdsprpc.so", "warning", refused, "htp", step)
    if not found:
        return Finding(AREA, "libcdsprpc.so", "missing", "not in /vendor/lib64 nor beside it", "htp", _CPU)
    return Finding(AREA, "libcdsprpc.so", "ok", found[0], "htp")


def _node(device: Device) -> Finding:
    """The kernel's door to the DSP."""
    name = "FastRPC device"
    there = device.script(_EXISTING, *_NODES).out.decode().split()
    readable = device.script(_READABLE, *there).out.decode().split() if there else []
    if readable:
        return Finding(AREA, name, "ok", ", ".join(readable), "htp")
    if there:
        found = f"{', '.join(there)}: adb's user may not open it"
        return Finding(AREA, name, "warning", found, "htp", "If a run fails with 14001 or 4000, this is why")
    # /dev may hide what it holds
    step = "If a run fails with 14001 or 4000, this is why"
    return Finding(AREA, name, "warning", f"none of {', '.join(_NODES)} to be seen", "htp", step)


def _dsp(device: Device) -> list[Finding]:
    folders, hidden = _listed(device, _DSP_FOLDERS)
    if not folders and hidden:
        return [Finding(AREA, "DSP files", "warning", hidden, "htp", _TRY)]
    if not folders:
        return [Finding(AREA, "DSP files", "missing", f"none of {', '.join(_DSP_FOLDERS)}", "htp", _CPU)]
    listed, refused = {}, []
    for folder in folders:
        done = device.shell("ls", folder, check=False)
        if done.status == 0:
            listed[folder] = done.out.decode(errors="replace").split("\n")
        else:
            refused.append(denied(done.err) or f"{folder}: cannot be listed")
    if not listed:
        return [Finding(AREA, "DSP files", "warning", "; ".join(refused), "htp", _TRY)]
    findings = []
    for name, shell, step in (
        ("DSP shell", _SHELL, "Look at the maker's update of the phone: the DSP starts programs with this file"),
        ("unsigned PD", _UNSIGNED, f"Only programs that the maker signed run on this DSP. {_CPU}"),
    ):
        where = [f"{folder}/{shell}" for folder, names in listed.items() if shell in names]
        if where:
            findings.append(Finding(AREA, name, "ok", where[0], "htp"))
        elif refused:
            findings.append(Finding(AREA, name, "warning", f"no {shell} to be seen; {'; '.join(refused)}", "htp", step))
        else:
            findings.append(Finding(AREA, name, "missing", f"no {shell} in {', '.join(listed)}", "htp", step))
    return findings


def _listed(device: Device, paths: Sequence[str]) -> tuple[list[str], str | None]:
    """Which of the paths are there, and what the phone says where it does not let adb's user see."""
    done = device.shell("ls", "-d", *paths, check=False)
    return done.out.decode(errors="replace").split(), denied(done.err)


def _libraries(device: Device, layout: PhoneLayout, soc: Soc | None) -> list[Finding]:
    """The bundle's files for this phone's Hexagon, where a bundle is there."""
    if soc is None or not device.script(_EXISTING, layout.manifest).out:
        return []
    names = ("libQnnHtp.so", "libQnnSystem.so", f"libQnnHtpV{soc.arch}Stub.so", f"libQnnHtpV{soc.arch}Skel.so")
    there = device.script(_EXISTING, *(f"{layout.libraries}/{name}" for name in names)).out.decode().split("\n")
    lacking = [name for name in names if f"{layout.libraries}/{name}" not in there]
    if lacking:
        step = f"Make the bundle with Hexagon v{soc.arch}'s libraries: estream device bundle, then estream device push"
        return [Finding(AREA, "QNN libraries", "missing", f"not in the bundle: {', '.join(lacking)}", "htp", step)]
    return [Finding(AREA, "QNN libraries", "ok", f"for Hexagon v{soc.arch}, in {layout.libraries}", "htp")]
