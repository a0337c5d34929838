"""The doctor on the real libraries: versions, devices, contexts that load and one that does not."""

from __future__ import annotations

from estream.doctor.npu import check_npu


def test_libraries_and_devices() -> None:
    found = {finding.name: finding for finding in check_npu()}
    assert all(finding.status == "ok" for finding in found.values()), found
    assert found["libQnnHtp"].found.startswith("QAIRT 2.")
    assert "QNNExecutionProvider" in found["devices"].found
