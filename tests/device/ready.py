"""A phone on which everything was done that docs/phone.md says, up to the first run."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from android.layout import PhoneLayout
from tests.device.cli import Estream, Said
from tests.device.phone import Phone

LAYOUT = PhoneLayout()
NO_NPU = (
    "libonnxruntime_providers_qnn.so found no NPU. Run `estream doctor`, for a phone `estream device doctor`, to see"
    " what is missing"
)
HOSTILE = "a b'c\"; $(touch oops) `id` &.estream"  # name of the package, here and there


@dataclass(frozen=True)
class Ready:
    """package: tiny, float32, here and on the phone. doctor_before, bundled, pushed: what these commands said."""

    phone: Phone
    estream: Estream
    bundle: Path
    package: Path
    doctor_before: Said
    bundled: Said
    pushed: Said

    def wait_for_silence(self) -> None:
        """Fails if a command left a process on the phone or an adb client here."""
        self.phone.wait_for_no_process()
        assert self.estream.clients() == []
