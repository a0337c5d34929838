"""EStream: Mixture-of-Experts prefill with the expert weights in flash.

import estream
estream.pack("checkpoint/", "model.estream", experts="int8")
with estream.Engine("model.estream") as engine:
    result = engine.prefill([1, 2, 3])
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from estream.errors import EStreamError
from estream.version import __version__

if TYPE_CHECKING:
    from estream.engine import Engine
    from estream.package.pack import pack
    from estream.result import PrefillResult

__all__ = ["EStreamError", "Engine", "PrefillResult", "__version__", "pack"]


def __getattr__(name: str) -> Any:
    """Loaded when first used: the engine, so that the command line starts at once; `pack`, which brings onnx, which a
    phone does not have."""
    if name in ("Engine", "PrefillResult"):
        from estream import engine

        return getattr(engine, name)
    if name == "pack":
        from estream.package.pack import pack

        return pack
    raise AttributeError(f"module 'estream' has no attribute {name!r}")
