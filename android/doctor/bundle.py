"""The bundle on the phone: there, whole, of this version, and does its Python start and find its libraries?"""

from __future__ import annotations

import dataclasses
import json
import shlex
from collections.abc import Sequence
from typing import Any

from android.bundle import MANIFEST
from android.clean import models_on
from android.client import DeviceError
from android.device import Device
from android.doctor.phone import denied
from android.layout import PhoneLayout
from android.record import PhoneFolder
from android.session import ask
from estream.doctor.finding import Finding
from estream.errors import EStreamError
from estream.package.contexts import FOLDER as CONTEXTS
from estream.package.manifest import MODEL
from estream.runtime.soc import Soc
from estream.version import __version__

AREA = "estream"
_PUSH = "Push it: estream device push --bundle BUNDLE"
_BUILD = "Make a bundle with this EStream and push it: estream device bundle, estream device push"


def check_bundle(device: Device, layout: PhoneLayout, soc: Soc | None) -> list[Finding]:
    """Findings of this area, and those that the phone's own Python has."""
    read = device.script('[ -e "$1" ] || exit 3; cat "$1"', layout.manifest, check=False)
    if read.status == 3:
        found = f"none in {layout.root}"
        return [Finding(AREA, "bundle", "missing", found, "cpu", "Make one: estream device bundle. " + _PUSH)]
    if read.status:
        reason = denied(read.err) or f"{layout.manifest} cannot be read"
        return [Finding(AREA, "bundle", "missing", reason, "cpu", _PUSH)]
    try:
        document = dict(json.loads(read.out))
    except (ValueError, TypeError, RecursionError):
        return [Finding(AREA, "bundle", "missing", f"{layout.manifest} is damaged", "cpu", _PUSH)]
    return [
        _version(document),
        _files(device, layout, document),
        *_python(device, layout),
        *_models(device, layout, soc),
    ]


def _version(document: dict[str, Any]) -> Finding:
    version, parts = document.get("estream", "unknown"), document.get("versions")
    told = ", ".join(f"{name} {parts[name]}" for name in sorted(parts)) if isinstance(parts, dict) else ""
    found = f"EStream {version}" + (f": {told}" if told else "")
    if version != __version__:
        return Finding(AREA, "bundle", "missing", f"{found}; this is EStream {__version__}", "cpu", _BUILD)
    return Finding(AREA, "bundle", "ok", found)


def _files(device: Device, layout: PhoneLayout, document: dict[str, Any]) -> Finding:
    entries = document.get("files")
    named = [entry["path"] for entry in entries if "path" in entry] if isinstance(entries, list) else []
    names = [*named, MANIFEST]
    changed = _changed(names, PhoneFolder(device, layout.root))
    if changed:
        return Finding(AREA, "files", "missing", changed, "cpu", _PUSH)
    return Finding(AREA, "files", "ok", f"{len(names)}, as they were pushed")


def _python(device: Device, layout: PhoneLayout) -> list[Finding]:
    """Whether it starts; then what it finds itself, as `estream doctor` does on a host."""
    program, env = f"{layout.python}/bin/python3", layout.fresh_environment
    started = device.shell(program, "-c", "import sys; print(sys.version.split()[0])", env=env, check=False)
    if started.status:
        return [Finding(AREA, "Python", "missing", *_why(started.status, started.err, program))]
    version = Finding(AREA, "Python", "ok", f"{started.out.decode(errors='replace').strip()}, starts")
    try:
        told = [Finding(**found) for found in ask(device, layout, "probe", {"folder": layout.root}).fields["findings"]]
    except DeviceError:
        raise
    except EStreamError as error:
        found = f"{error.thing}: {error.had}" if error.had is not None else error.thing
        return [version, Finding(AREA, "program", "missing", found, "cpu", error.next_step or _BUILD)]
    except (KeyError, TypeError):
        return [version, Finding(AREA, "program", "missing", "its findings cannot be read", "cpu", _BUILD)]
    return [version, *(dataclasses.replace(one, area=f"{one.area}, as Python there sees it") for one in told)]


def _why(status: int, err: bytes, program: str) -> tuple[str, Any, str]:
    """(what was found, needed for, next step) of a Python that does not do what it should."""
    said = [line.strip() for line in err.decode(errors="replace").splitlines() if line.strip()]
    text = said[-1][-300:] if said else f"status {status}"
    refused = denied(err)
    if refused:
        return refused, "cpu", "Leave --target out: programs run from /data/local/tmp only"
    if b"CANNOT LINK" in err or b"error while loading shared libraries" in err or b"not found" in err:
        return text, "cpu", "A library is missing or of another version. " + _BUILD
    if status in (132, 134, 135, 139):
        return f"{program} crashed (status {status}): {text}", "cpu", _BUILD
    return text, "cpu", _PUSH


def _models(device: Device, layout: PhoneLayout, soc: Soc | None) -> list[Finding]:
    """Which are whole, and have contexts for this phone."""
    try:
        names = models_on(device, layout)
        return [_model(PhoneFolder(device, f"{layout.models}/{name}"), name, soc) for name in names] or [
            Finding(AREA, "models", "warning", "none", "cpu", "Push one: estream device push PACKAGE")
        ]
    except DeviceError as error:
        if error.status is None:
            raise
        return [Finding(AREA, "models", "warning", error.thing, "cpu", error.next_step)]


def _model(folder: PhoneFolder, name: str, soc: Soc | None) -> Finding:
    push = f"estream device push {shlex.quote(name)}"
    if MODEL not in folder.present:
        step = f"Push it again, it goes on where it ended: {push}"
        return Finding(AREA, "model", "warning", f"{name}: not completely pushed", "cpu", step)
    pushed = sorted({MODEL, *folder.pushed})
    changed = _changed(pushed, folder)
    if changed:
        return Finding(AREA, "model", "warning", f"{name}: {changed}", "cpu", f"Push it again: {push}")
    if soc is not None and not any(file.startswith(f"{CONTEXTS}/{soc.name}/") for file in folder.present):
        step = f"Compile them and push again: estream compile {shlex.quote(name)} --soc {soc.name}"
        return Finding(AREA, "model", "warning", f"{name}: no contexts for {soc.name}", "htp", step)
    return Finding(AREA, "model", "ok", name)


def _changed(names: Sequence[str], folder: PhoneFolder) -> str | None:
    """What is not as the record of what was pushed and verified has it, by sizes and times; None: nothing."""
    changed = [name for name in names if name not in folder.verified]
    if not changed:
        return None
    most = ", ".join(changed[:3]) + (", ..." if len(changed) > 3 else "")
    return f"{len(changed)} of {len(names)} are missing, or not as they were pushed: {most}"
