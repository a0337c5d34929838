"""One prefill on the phone: token ids go there, logits, statistics and trace come back."""

from __future__ import annotations

import secrets
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from android.events import ProtocolError
from android.layout import PhoneLayout
from android.session import Listener, ask, request_of
from estream.errors import EStreamError

if TYPE_CHECKING:
    from android.adb import Device


@dataclass(frozen=True)
class PhoneRun:
    """logits: float32 [V] of the last token. hidden: float32 [N, H] or None. trace: Chrome trace events as JSON, or
    None. stats, configuration: as of `PrefillResult`. device: what ran it. folder: what was kept on the phone."""

    tokens: int
    logits: np.ndarray
    hidden: np.ndarray | None
    trace: str | None
    stats: dict[str, Any]
    configuration: dict[str, Any]
    device: dict[str, Any]
    folder: str | None


def run(
    device: Device,
    layout: PhoneLayout,
    package: Path,
    ids: Sequence[int],
    options: Mapping[str, Any],
    *,
    hidden: bool = False,
    trace: bool = False,
    keep: bool = False,
    listener: Listener | None = None,
) -> PhoneRun:
    """Prefills `ids` with the phone's copy of the host's `package`. options: of `Engine`, by name.

    keep: leaves the run's folder on the phone. Raises as `android.session.ask`, and OSError.
    """
    folder = f"{layout.runs}/{time.strftime('%Y%m%d-%H%M%S')}-{secrets.token_hex(3)}"
    request = {
        **request_of(layout, package, options),
        "ids": [int(token) for token in ids],
        "hidden": hidden,
        "trace": trace,
        "out": folder,
    }
    with _folder(device, folder, keep), tempfile.TemporaryDirectory(prefix="estream-run-") as pulled:
        answer = ask(device, layout, "run", request, listener)
        try:
            for name in answer.fields["files"]:
                device.pull(f"{folder}/{name}", Path(pulled, Path(name).name))
            return PhoneRun(
                tokens=answer.fields["tokens"],
                logits=_array(Path(pulled, "logits.npy"), 1),
                hidden=_array(Path(pulled, "hidden.npy"), 2) if hidden else None,
                trace=Path(pulled, "trace.json").read_text() if trace else None,
                stats=answer.fields["stats"],
                configuration=answer.fields["configuration"],
                device=answer.device(device.serial),
                folder=folder if keep else None,
            )
        except KeyError as error:
            raise ProtocolError("the phone's result lacks a field", had=f"no {error}") from error


@contextmanager
def _folder(device: Device, folder: str, keep: bool) -> Iterator[None]:
    """Removes the run's folder on the phone, also after an error; where the phone has gone, it stays."""
    try:
        yield
    finally:
        if not keep:
            with suppress(EStreamError):
                device.shell("rm", "-rf", folder, timeout_s=10, check=False)


def _array(path: Path, dimensions: int) -> np.ndarray:
    try:
        array = np.load(path, allow_pickle=False)
    except (OSError, ValueError, EOFError) as error:
        raise ProtocolError(f"{path.name} of the phone cannot be read: {error}") from error
    if not isinstance(array, np.ndarray) or array.dtype != np.float32 or array.ndim != dimensions:
        raise ProtocolError(f"{path.name} of the phone is no float32 array of {dimensions} dimension(s)")
    return array
