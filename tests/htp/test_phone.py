"""The phone's program on the NPU's simulator: libraries from a folder, no package of the host's, contexts only."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from android.run import run
from android.session import ask
from estream import Engine
from estream.errors import TargetError
from estream.runtime.capi import find_library
from estream.runtime.htp import QnnLibraries
from tests.support.fake_device import FakeDevice
from tests.support.htp_packages import compiled

IDS = [3, 1, 4, 1, 5]
OPTIONS = {"backend": "htp", "soc": "sm8650"}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return compiled(tmp_path_factory.mktemp("phone"), "mixtral", num_hidden_layers=1)[0]


@pytest.fixture
def phone(package: Path, tmp_path: Path) -> FakeDevice:
    fake = FakeDevice(tmp_path / "phone", runtime=find_library())
    installed = QnnLibraries.find().plugin.parent
    beside = installed.with_name(f"{installed.name}.libs")  # what the x86-64 libraries of the package need
    Path(fake.layout.root, beside.name).symlink_to(beside)
    for library in installed.glob("*.so"):
        Path(fake.layout.libraries, library.name).symlink_to(library)
    shutil.copytree(package, Path(fake.layout.models, package.name))
    return fake


def test_logits_are_the_host_s(phone: FakeDevice, package: Path) -> None:
    with Engine(package, "htp", max_tokens=len(IDS)) as engine:
        expected = engine.prefill(IDS).logits
    done = run(phone, phone.layout, package, IDS, OPTIONS)  # type: ignore[arg-type]
    assert expected is not None and done.logits.tobytes() == expected.tobytes()
    assert done.configuration["backend"] == "htp" and done.configuration["simulated"] is True


def test_what_is_missing_for_the_npu(phone: FakeDevice, package: Path) -> None:
    with pytest.raises(TargetError, match="has no contexts for sm8850"):
        run(phone, phone.layout, package, IDS, {**OPTIONS, "soc": "sm8850"})  # type: ignore[arg-type]
    Path(phone.layout.libraries, "libQnnHtp.so").unlink()
    with pytest.raises(TargetError, match=r"libQnnHtp.so was not found in"):
        run(phone, phone.layout, package, IDS, OPTIONS)  # type: ignore[arg-type]


def test_probe_finds_the_npu_and_the_contexts(phone: FakeDevice, package: Path) -> None:
    place = f"{phone.layout.models}/{package.name}"
    request = {"folder": phone.layout.models, "package": place}
    answer = ask(phone, phone.layout, "probe", request)  # type: ignore[arg-type]
    found = {finding["name"]: finding for finding in answer.fields["findings"]}
    for name in ("QNN provider", "libQnnHtp", "devices", "contexts sm8650", "ONNX Runtime", "package"):
        assert found[name]["status"] == "ok", found[name]
    assert phone.layout.libraries in found["QNN provider"]["found"]
    assert found["libcdsprpc.so"]["status"] == "missing" and found["libcdsprpc.so"]["needed_for"] == "htp"
    assert answer.fields["ok"] is True
