"""`estream doctor`: what this machine has for EStream, and what it lacks. Run-time part: numpy only."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from estream.doctor.finding import Finding
from estream.doctor.machine import check_machine
from estream.doctor.npu import check_npu
from estream.doctor.package import check_package
from estream.doctor.software import check_software
from estream.doctor.storage import check_storage

__all__ = ["Diagnosis", "Finding", "examine"]


@dataclass(frozen=True)
class Diagnosis:
    """`ok`: nothing that target cpu needs is missing."""

    findings: tuple[Finding, ...]

    @property
    def ok(self) -> bool:
        return not any(finding.fails for finding in self.findings)

    def to_dict(self) -> dict[str, object]:
        """JSON-ready."""
        return {"ok": self.ok, "findings": [finding.to_dict() for finding in self.findings]}


def examine(package: Path | None = None, *, libraries: Path | None = None, folder: Path | None = None) -> Diagnosis:
    """Looks at software, NPU, machine and storage, and at a packed model where one is given. Never raises for what it
    finds. Storage is the package's, or else that of `folder` (None: the current one). libraries: the folder of ONNX
    Runtime's and QNN's libraries on a phone; None: those of the installed packages."""
    findings = [*check_software(libraries), *check_npu(libraries), *check_machine()]
    pool = None if package is None else package / "experts.safetensors"
    if pool is not None and pool.is_file():
        findings += check_storage(pool.parent, pool)
    elif package is None:
        findings += check_storage(folder or Path.cwd())
    if package is not None:
        findings += check_package(package, libraries)
    return Diagnosis(tuple(findings))
