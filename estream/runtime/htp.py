"""Target `htp`: the Hexagon NPU through the QNN execution provider, loaded as a plugin.

On a phone the provider runs on the NPU, and all memory is shared with it (`shared.py`). On x86-64 the same library
simulates it: numbers are the HTP's, times are not. Every node runs on the NPU or a graph does not load. Floats on the
HTP are float16, whatever an option says.
"""

from __future__ import annotations

import ctypes
import importlib.util
import platform
import threading
from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from estream.errors import TargetError
from estream.runtime.capi import CApi
from estream.runtime.graph import OrtGraph
from estream.runtime.npu_graph import NpuGraph
from estream.runtime.ort import OrtTarget
from estream.runtime.session import Session
from estream.runtime.shared import SharedMemory, check_library
from estream.runtime.target import Buffer

PROVIDER = "QNNExecutionProvider"
_PLUGIN = "libonnxruntime_providers_qnn.so"
_BACKEND = "libQnnHtp.so"
_REFUSED = "docs/phone.md says what its numbers mean"
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
    shared: memory that the NPU sees, instead of the host's, which its driver copies at every call; None: unless this
    machine simulates the NPU. It comes from the first loaded graph's session: nothing can be allocated before.
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
        shared: bool | None = None,
    ) -> None:
        self.max_rows = max_rows
        self.simulated = simulated()
        self.shared = not self.simulated if shared is None else shared
        self._shared_memory: SharedMemory | None = None
        self._copied = 0
        self._libraries = QnnLibraries.find(folder)
        self._provider_options = {"backend_path": str(self._libraries.backend), **options}
        if self.shared:
            self._provider_options["enable_htp_shared_memory_allocator"] = "1"
        super().__init__(threads=threads, library=library)

    @property
    def shared_bytes(self) -> int | None:
        """Mapped for host and NPU; None where memory is the host's."""
        return None if self._shared_memory is None else self._shared_memory.nbytes

    @property
    def shared_mappings(self) -> int | None:
        return None if self._shared_memory is None else self._shared_memory.mappings

    @property
    def npu_bytes_copied(self) -> int | None:
        """Bytes of tensors in memory that the NPU does not see, over all runs; None in a simulator without any."""
        return None if self.simulated and not self.shared else self._copied

    def allocate(self, nbytes: int, label: str) -> Buffer:
        """As a Target's. Raises TargetError, also before a graph was loaded where memory is shared."""
        return self._memory_for(label).allocate(nbytes, label) if self.shared else super().allocate(nbytes, label)

    def allocate_pieces(self, sizes: Sequence[int], label: str) -> list[Buffer]:
        if not self.shared:
            return super().allocate_pieces(sizes, label)
        return self._memory_for(label).allocate_pieces(sizes, label)

    def load(self, path: Path) -> OrtGraph:
        """Also raises TargetError where memory is to be shared and cannot be."""
        log = self._environment.log
        log.take()
        try:
            graph = super().load(path)
        except TargetError as error:
            if self.shared and self._shared_memory is None:
                check_library()
            logged = log.take(error.thing)
            if logged is None:
                raise
            # The status says no more than that nodes are left to the CPU.
            raise TargetError(error.thing, had=logged, next_step=error.next_step or _REFUSED) from error
        if self.shared and self._shared_memory is None:
            self._shared_memory = SharedMemory(self._api, self._device(), graph.session_handle)
        return graph

    def close(self) -> None:
        """Tensor handles, sessions, memory, its allocator, the session that this belongs to, the run time."""
        memory, self._shared_memory = self._shared_memory, None
        try:
            if memory is not None:
                for graph in self._graphs:
                    graph.unbind()
                while len(self._graphs) > 1:
                    self._graphs.pop().close()
                memory.close()
        finally:
            super().close()

    def _memory_for(self, label: str) -> SharedMemory:
        self._check_open(f"allocate {label}")
        if self._shared_memory is None:
            raise TargetError(f"no memory for {label}: it comes from a session", next_step="Load a graph first")
        return self._shared_memory

    def _make_graph(self, name: str, session: Session) -> OrtGraph:
        return NpuGraph(name, self._api, session, self._memory_info, self)

    def in_shared_memory(self, buffer: Buffer) -> int | None:
        """What ONNX Runtime is told of a buffer that the NPU sees; None: it does not."""
        memory = self._shared_memory
        return memory.memory_info if memory is not None and memory.owns(buffer) else None

    def count_copied(self, nbytes: int) -> None:
        """A graph runs with so many bytes of tensors in memory that the NPU does not see."""
        self._copied += nbytes

    def _device(self) -> int:
        devices = self._api.provider_devices(self._environment.handle, PROVIDER)
        if not devices:
            raise TargetError(
                f"{self._libraries.plugin.name} found no NPU",
                next_step="Run `estream doctor`, for a phone `estream device doctor`, to see what is missing",
            )
        return devices[0]

    def _open_provider(self, resources: ExitStack) -> None:
        register_plugin(self._api, self._environment.handle, self._libraries.plugin)
        resources.callback(unregister_plugin, self._api, self._environment.handle)

    def _configure(self, options: int) -> None:
        api, what = self._api, "session options of the NPU"
        device = self._device()
        api.call("AddSessionConfigEntry", options, b"session.disable_cpu_ep_fallback", b"1", what=what)
        count = len(self._provider_options)
        keys = (ctypes.c_char_p * count)(*(key.encode() for key in self._provider_options))
        values = (ctypes.c_char_p * count)(*(value.encode() for value in self._provider_options.values()))
        chosen = (ctypes.c_void_p * 1)(device)
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
