"""`estream device doctor`: what the phone has for EStream, and what it lacks. Looks only, apart from one small file."""

from __future__ import annotations

from dataclasses import dataclass

from android.device import Device
from android.doctor.bundle import check_bundle
from android.doctor.npu import check_npu
from android.doctor.phone import check_phone
from android.doctor.storage import check_storage
from android.layout import PhoneLayout
from android.properties import find_phone_soc, read_properties
from estream.doctor.finding import Finding


@dataclass(frozen=True)
class PhoneDiagnosis:
    """`ok`: nothing is missing that a run on `backend` needs."""

    serial: str
    backend: str
    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.status == "missing" and finding.needed_for in self.needs for finding in self.findings)

    @property
    def needs(self) -> tuple[str, ...]:
        return ("cpu",) if self.backend == "cpu" else ("cpu", "htp")

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        findings = [finding.to_dict() for finding in self.findings]
        return {"ok": self.ok, "serial": self.serial, "backend": self.backend, "findings": findings}


def examine_phone(device: Device, layout: PhoneLayout, backend: str = "htp") -> PhoneDiagnosis:
    """Looks at the phone, the NPU's libraries, the storage under the layout's root, and the bundle there.

    Raises DeviceError: the connection broke. Whatever else the phone refuses is a finding.
    """
    properties = read_properties(device)
    soc = find_phone_soc(properties)
    storage = check_storage(device, layout.root)
    findings = [
        *check_phone(device, properties),
        *check_npu(device, layout, soc),
        *storage,
        *check_bundle(device, layout, soc),
    ]
    return PhoneDiagnosis(device.serial, backend, tuple(findings))
