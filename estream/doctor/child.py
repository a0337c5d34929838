"""What might end the process that tries it: `python -m estream.doctor.child WHAT [ARGUMENT]`.

Prints one line `estream: {...}`, JSON, among whatever native code prints. `ask` is the other side of it.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

from estream.errors import TargetError

_MARK = "estream: "
_TIMEOUT_S = 120.0
_ROOT = Path(__file__).resolve().parents[2]


def ask(what: str, *arguments: str | Path, timeout_s: float = _TIMEOUT_S) -> dict[str, Any]:
    """Runs one of the functions below in a process of its own and returns its answer.

    Raises TargetError: it failed (its own message), it was killed by a signal (named), or it did not end in time.
    """
    command = [sys.executable, "-m", "estream.doctor.child", what, *map(str, arguments)]
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    try:
        done = subprocess.run(
            command,
            env={**os.environ, "PYTHONPATH": path},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            errors="replace",
            timeout=timeout_s,
        )
    except subprocess.TimeoutExpired as error:
        raise TargetError("no answer in time", asked=f"{timeout_s:g} s") from error
    lines = [line.removeprefix(_MARK) for line in done.stdout.splitlines() if line.startswith(_MARK)]
    answer: dict[str, Any] | None = json.loads(lines[-1]) if lines else None
    if answer is not None and "error" in answer:
        raise TargetError(answer["error"], next_step=answer["next_step"])
    # It may crash after the answer, too, when libraries are unloaded: that would end the engine's process as well.
    if done.returncode < 0:
        raise TargetError(f"the process was killed by {signal.Signals(-done.returncode).name}")
    if answer is None or done.returncode:
        raise TargetError(f"status {done.returncode}: {done.stdout.strip()[-300:]}")
    return answer


def runtime(libraries: str | None = None) -> dict[str, Any]:
    """Loads ONNX Runtime, of a folder or the installed one, as the functions below do."""
    api = _api(libraries)
    return {"library": str(api.library), "version": api.version}


def graphs(folder: str, libraries: str | None = None) -> dict[str, Any]:
    """Loads every graph of the set under `folder` that target cpu takes here."""
    from estream.runtime import open_target

    target = open_target("cpu", threads=1, libraries=libraries)
    try:
        paths = sorted(Path(folder, target.graphs).glob("*.onnx"))
        return {"set": target.graphs, "loaded": [target.load(path).name for path in paths]}
    finally:
        target.close()


def devices(plugin: str, libraries: str | None = None) -> dict[str, Any]:
    """Registers a plugin and names the execution providers of all devices."""
    from estream.runtime.environment import Environment
    from estream.runtime.htp import register_plugin, unregister_plugin

    api = _api(libraries)
    environment = Environment(api, 1)
    register_plugin(api, environment.handle, Path(plugin))
    names = [name for _, name in api.devices(environment.handle)]
    unregister_plugin(api, environment.handle)
    environment.close()
    return {"devices": names}


def context(file: str, soc: str, libraries: str | None = None) -> dict[str, Any]:
    """Loads a context that was compiled for `soc` on target htp."""
    from estream.runtime import open_target

    target = open_target("htp", threads=1, soc=soc, libraries=libraries)
    try:
        graph = target.load(Path(file))
        return {"inputs": len(graph.inputs), "outputs": len(graph.outputs)}
    finally:
        target.close()


def qnn(library: str) -> dict[str, Any]:
    """Asks a QNN back end for its build, which is QAIRT's version, and the version of its interface."""
    from estream.runtime.qairt import qnn_build

    build, api = qnn_build(Path(library))
    return {"build": build, "api": api}


def _api(libraries: str | None) -> Any:
    from estream.runtime.capi import find_library, load_capi

    return load_capi(None if libraries is None else find_library(libraries))


def library(name: str) -> dict[str, Any]:
    """Loads any library, by path or by the name that the system finds it under."""
    ctypes.CDLL(name)
    return {}


_FUNCTIONS = {function.__name__: function for function in (runtime, graphs, devices, context, qnn, library)}


def main(arguments: list[str]) -> None:
    """Prints an answer, or the error as one."""
    answer: dict[str, Any]
    try:
        answer = _FUNCTIONS[arguments[0]](*arguments[1:])
    except Exception as error:  # the parent's finding, whatever it is
        said = str(error) if isinstance(error, TargetError) else f"{type(error).__name__}: {error}"
        step = getattr(error, "next_step", None)
        answer = {"error": said.removesuffix(f". {step}") if step else said, "next_step": step}
    print(f"\n{_MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
