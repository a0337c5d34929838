"""Running graphs: ONNX Runtime through its C API, the targets, a mock target. Numpy and the standard library only."""

from __future__ import annotations

import os
from pathlib import Path

from estream.errors import UsageError
from estream.runtime.capi import find_library
from estream.runtime.target import Buffer, Graph, Target, TensorInfo

__all__ = ["TARGETS", "Buffer", "Graph", "Target", "TensorInfo", "open_target"]

TARGETS = ("cpu", "htp", "mock")
MOST_THREADS = 256
SHARED_VARIABLE = "ESTREAM_SHARED_MEMORY"


def open_target(
    name: str,
    *,
    threads: int | None = None,
    reference: bool = False,
    libraries: str | Path | None = None,
    soc: str | None = None,
    shared: bool | None = None,
) -> Target:
    """Opens a target by name; close it when done.

    Args:
        name: `cpu` (ONNX Runtime's CPU provider), `htp` (the NPU, or its simulator on x86-64)
            or `mock` (no run time: records, executes nothing).
        threads: compute threads; None: as many as this process has cores.
        reference: use the package's reference graphs (dequantise, then float32) instead of the target's own.
        libraries: the folder of libonnxruntime.so and, for htp, of the QNN libraries, as on a phone; None: those of the
            installed packages.
        soc: htp only: the phone that is simulated, or whose contexts are loaded.
        shared: htp only: memory that the NPU sees; None: as the environment variable ESTREAM_SHARED_MEMORY says (`on`,
            `off`), or else wherever the NPU is not simulated.

    Raises:
        UsageError: unknown name or SoC, a thread count that is not 1 to MOST_THREADS, or an option that the target does
            not have.
        TargetError: the run time cannot be found or started.
    """
    if threads is not None and (type(threads) is not int or not 1 <= threads <= MOST_THREADS):
        raise UsageError(f"--threads must be a whole number, 1 to {MOST_THREADS}", asked=repr(threads))
    library = None if libraries is None or name == "mock" else find_library(libraries)
    if name == "cpu":
        from estream.runtime.cpu import CpuTarget

        return CpuTarget(threads=threads, reference=reference, library=library)
    if name == "htp":
        from estream.runtime.htp import HtpTarget
        from estream.runtime.soc import DEFAULT_SOC, find_soc

        if reference:
            raise UsageError("target htp has no reference graphs", next_step="Use --backend cpu --reference")
        options = find_soc(soc or DEFAULT_SOC).provider_options
        if shared is None:
            shared = _shared_by_environment()
        return HtpTarget(options, threads=threads, folder=libraries, library=library, shared=shared)
    if name == "mock":
        from estream.runtime.mock import MockTarget

        return MockTarget(reference=reference)
    raise UsageError("unknown target", asked=name, had=", ".join(TARGETS), next_step="Choose one of these")


def _shared_by_environment() -> bool | None:
    """Raises UsageError for a value that cannot be meant."""
    said = os.environ.get(SHARED_VARIABLE, "auto")
    choices = {"auto": None, "on": True, "off": False}
    if said not in choices:
        raise UsageError(f"{SHARED_VARIABLE} cannot be {said!r}", had=", ".join(choices), next_step="Choose one")
    return choices[said]
