"""An ONNX Runtime session in which every node runs on the HTP, or none does."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import onnxruntime
import onnxruntime_qnn

from estream.runtime.soc import Soc

PROVIDER = "QNNExecutionProvider"
SILENT = 4  # ONNX Runtime's log severity: 0 everything, 4 fatal only
VERBOSE = 0


@cache
def _device() -> Any:
    """The provider's NPU device; the plugin is registered once per process."""
    onnxruntime.register_execution_provider_library(PROVIDER, onnxruntime_qnn.get_library_path())
    return next(device for device in onnxruntime.get_ep_devices() if device.ep_name == PROVIDER)


def open_session(model: bytes | Path, soc: Soc, *, severity: int = SILENT, context: Path | None = None) -> Any:
    """An `onnxruntime.InferenceSession` for `soc`, compiled here and run by the simulator.

    Args:
        model: a serialised ONNX model, or the file that wraps a compiled context.
        context: where to write the compiled context's wrapper; the binary goes beside it as `<stem>_qnn.bin`.

    Raises:
        Exception: whatever ONNX Runtime raises when a node is refused or the graph does not compile.
    """
    onnxruntime.set_default_logger_severity(severity)
    options = onnxruntime.SessionOptions()
    options.log_severity_level = severity
    options.add_session_config_entry("session.disable_cpu_ep_fallback", "1")
    if context is not None:
        options.add_session_config_entry("ep.context_enable", "1")
        options.add_session_config_entry("ep.context_file_path", str(context))
        options.add_session_config_entry("ep.context_embed_mode", "0")
    provider = {
        "backend_path": onnxruntime_qnn.get_qnn_htp_path(),
        "enable_htp_fp16_precision": "1",
        "htp_graph_finalization_optimization_mode": "3",
        **soc.provider_options,
    }
    options.add_provider_for_devices([_device()], provider)
    return onnxruntime.InferenceSession(str(model) if isinstance(model, Path) else model, options)
