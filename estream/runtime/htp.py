"""Target `htp`: the Hexagon NPU through the QNN execution provider, loaded as a plugin.

On a phone the provider runs on the NPU. On x86-64 the same library simulates it: numbers are the HTP's, times are not.
Every node runs on the NPU or a graph does not load. Floats on the HTP are float16, whatever an option says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import threading
from collections.abc import Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from estream.errors import TargetError
from estream.runtime.capi import CApi
from estream.runtime.ort import OrtTarget

PROVIDER = "QNNExecutionProvider"
_PLUGIN = "libonnxruntime_providers_qnn.so"
_BACKEND = "libQnnHtp.so"
MAX_ROWS = 256  # of the largest tile; blocks have the rows that their graphs were built for

_lock = threading.Lock()
_registered: dict[int, int] = {}  # environment handle -> targets that use the plugin


@dataclass(frozen=True)
class QnnLibraries:
    """The provider's plugin and QNN's HTP back end."""

    plugin: Path
    backend: Path

    @classmethod
    def find(cls, folder: str | Path | None = None) -> QnnLibraries:
        """In `folder` (None: the installed onnxruntime_qnn package). Raises TargetError naming what is missing."""
        if folder is None:
            spec = importlib.util.find_spec("onnxruntime_qnn")
            folders = list(spec.submodule_search_locations or ()) if spec else []
            if not folders:
                raise TargetError("the onnxruntime_qnn package is not installed", next_step="Install onnxruntime-qnn")
            folder = folders[0]
        found = cls(Path(folder, _PLUGIN), Path(folder, _BACKEND))
        for path in (found.plugin, found.backend):
            if not path.is_file():
                raise TargetError(f"{path.name} was not found in {folder}", next_step="Reinstall onnxruntime-qnn")
        return found


def simulated() -> bool:
    """Whether this machine simulates the HTP instead of having one."""
    return platform.machine() in ("x86_64", "AMD64")


class HtpTarget(OrtTarget):
    """Graphs on the NPU, or in its simulator.

    options: what the provider is told beside the back end, for instance soc_model and htp_arch.
    folder: where the QNN libraries lie; None: the installed package.
    """

    name = "htp"
    graphs = "htp"
    signed = False

    def __init__(
        self,
        options: Mapping[str, str],
        *,
        max_rows: int = MAX_ROWS,
        threads: int | None = None,
        folder: str | Path | None = None,
        library: str | Path | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.simulated = simulated()
        self._libraries = QnnLibraries.find(folder)
        self._provider_options = {"backend_path": str(self._libraries.backend), **options}
        super().__init__(threads=threads, library=library)

    def _open_provider(self, resources: ExitStack) -> None:
        register_plugin(self._api, self._environment.handle, self._libraries.plugin)
        resources.callback(unregister_plugin, self._api, self._environment.handle)

    def _configure(self, options: int) -> None:
        api, what = self._api, "session options of the NPU"
        devices = api.provider_devices(self._environment.handle, PROVIDER)
        if not devices:
            raise TargetError(
                f"{self._libraries.plugin.name} found no NPU", next_step="Run `estream doctor` to see what is missing"
            )
        api.call("AddSessionConfigEntry", options, b"session.disable_cpu_ep_fallback", b"1", what=what)
        count = len(self._provider_options)
        keys = (ctypes.c_char_p * count)(*(key.encode() for key in self._provider_options))
        values = (ctypes.c_char_p * count)(*(value.encode() for value in self._provider_options.values()))
        chosen = (ctypes.c_void_p * 1)(devices[0])
        api.call(
            "SessionOptionsAppendExecutionProvider_V2",
            *(options, self._environment.handle, chosen, 1, keys, values, count),
            what=what,
        )


def register_plugin(api: CApi, environment: int, plugin: Path) -> None:
    """Makes the provider known to an environment; counted, since it may be registered once only."""
    with _lock:
        if not _registered.get(environment):
            what = f"execution provider {plugin.name}"
            api.call(
                "RegisterExecutionProviderLibrary", environment, PROVIDER.encode(), str(plugin).encode(), what=what
            )
        _registered[environment] = _registered.get(environment, 0) + 1


def unregister_plugin(api: CApi, environment: int) -> None:
    """Gives one registration back; the last one unloads the plugin."""
    with _lock:
        _registered[environment] -= 1
        if not _registered[environment]:
            del _registered[environment]
            api.call("UnregisterExecutionProviderLibrary", environment, PROVIDER.encode(), what="execution provider")
