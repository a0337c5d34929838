"""Model, Android, SoC, memory, heat, SELinux."""

from __future__ import annotations

import re
from collections.abc import Mapping

from android.device import Device
from android.properties import find_phone_soc, soc_name
from estream.doctor.finding import Finding
from estream.runtime.soc import SOCS
from estream.units import format_bytes

AREA = "phone"
_LITTLE = 1 << 30
_HEAT = ("none", "light", "moderate", "severe", "critical", "emergency", "shutdown")
_COOL = "Let it cool down: figures of a throttled phone are not worth comparing"
_SENSOR = re.compile(r"Temperature\{mValue=([-\d.]+), mType=(\d+), mName=([^,}]+), mStatus=\d+\}")
_SHOWN = {"0": "CPU", "2": "battery", "3": "skin"}


def check_phone(device: Device, properties: Mapping[str, str]) -> list[Finding]:
    """Findings of this area."""
    return [
        _model(device, properties),
        _android(properties),
        _soc(properties),
        *_memory(device),
        _heat(device),
        _selinux(device),
    ]


def _model(device: Device, properties: Mapping[str, str]) -> Finding:
    words = [properties.get(f"ro.product.{name}", "") for name in ("manufacturer", "model")]
    name = " ".join(filter(None, words)) or device.details.get("model", "unknown")
    return Finding(AREA, "model", "ok", f"{name}, serial number {device.serial}")


def _android(properties: Mapping[str, str]) -> Finding:
    version, abi = properties.get("ro.build.version.release", "?"), properties.get("ro.product.cpu.abi", "unknown")
    found = f"{version} (API {properties.get('ro.build.version.sdk', '?')}), {abi}"
    if abi != "arm64-v8a":
        step = "Use a phone with 64-bit ARM: the bundle's programs are made for that"
        return Finding(AREA, "Android", "missing", found, "cpu", step)
    return Finding(AREA, "Android", "ok", found)


def _soc(properties: Mapping[str, str]) -> Finding:
    soc = find_phone_soc(properties)
    if soc is None:
        step = f"Contexts are compiled for {', '.join(SOCS)}: use such a phone, or --backend cpu"
        return Finding(AREA, "SoC", "missing", f"{soc_name(properties)}, which EStream does not know", "htp", step)
    return Finding(AREA, "SoC", "ok", f"{soc_name(properties)}, Hexagon v{soc.arch}")


def _memory(device: Device) -> list[Finding]:
    done = device.shell("cat", "/proc/meminfo", check=False)
    fields = dict(re.findall(r"^(\w+):\s+(\d+) kB$", done.out.decode(errors="replace"), re.MULTILINE))
    if not {"MemTotal", "MemAvailable"} <= fields.keys():
        step = "Give --memory: it cannot be checked on this phone"
        return [Finding(AREA, "memory", "warning", denied(done.err) or "unknown", "cpu", step)]
    total, available = int(fields["MemTotal"]) << 10, int(fields["MemAvailable"]) << 10
    found = f"{format_bytes(total)}, {format_bytes(available)} available"
    if available < _LITTLE:
        step = "Close apps: the system kills programs when memory runs out"
        memory = Finding(AREA, "memory", "warning", found, "cpu", step)
    else:
        memory = Finding(AREA, "memory", "ok", found)
    swap, free = int(fields.get("SwapTotal", 0)) << 10, int(fields.get("SwapFree", 0)) << 10
    kind = " (zram: it takes memory itself)" if b"zram" in device.shell("cat", "/proc/swaps", check=False).out else ""
    told = f"{format_bytes(swap)}, {format_bytes(free)} free{kind}" if swap else "none"
    return [memory, Finding(AREA, "swap", "ok", told)]


def _heat(device: Device) -> Finding:
    text = device.shell("dumpsys", "thermalservice", check=False).out.decode(errors="replace")
    status = re.search(r"Thermal Status:\s*(\d+)", text)
    degrees: dict[str, float] = {}
    for value, kind, _ in _SENSOR.findall(text):
        if kind in _SHOWN and float(value) > 0:
            degrees[_SHOWN[kind]] = max(degrees.get(_SHOWN[kind], 0.0), float(value))
    if not degrees:
        degrees = _zones(device)
    shown = ", ".join(f"{name} {value:.0f} °C" for name, value in degrees.items())
    if status is None:
        step = None if shown else "Watch the phone: whether it throttles cannot be seen"
        return Finding(AREA, "heat", "ok" if shown else "warning", shown or "not told by this phone", "cpu", step)
    level = min(int(status[1]), len(_HEAT) - 1)
    found = ", ".join(filter(None, (f"throttling {_HEAT[level]}", shown)))
    return Finding(AREA, "heat", "warning" if level >= 2 else "ok", found, "cpu", _COOL if level >= 2 else None)


def _zones(device: Device) -> dict[str, float]:
    """The hottest thermal zone, where the phone lets adb's user read it."""
    read = "cat /sys/class/thermal/thermal_zone*/temp 2>/dev/null; true"
    values = [int(word) / 1000 for word in device.script(read).out.split() if word.lstrip(b"-").isdigit()]
    likely = [value for value in values if 0 < value < 150]
    return {"hottest zone": max(likely)} if likely else {}


def _selinux(device: Device) -> Finding:
    mode = device.shell("getenforce", check=False)
    said = mode.out.decode(errors="replace").strip()
    return Finding(AREA, "SELinux", "ok", said or "unknown")


def denied(err: bytes) -> str | None:
    """The phone's own words, where it refused something."""
    for line in err.decode(errors="replace").splitlines():
        if "Permission denied" in line or "Operation not permitted" in line or "avc:" in line:
            return f"refused by the phone (permissions or SELinux): {line.strip()}"
    return None
