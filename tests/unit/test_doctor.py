"""The doctor's findings on machines made up of files, and what it says when a child process dies."""

from __future__ import annotations

import dataclasses
import json
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estream import doctor
from estream.cli import main
from estream.doctor import child, machine, npu, package, software, storage
from estream.doctor.finding import Finding
from estream.errors import FlashError, TargetError
from estream.package.contexts import ContextEntry, ContextFile, expected_manifest, file_names
from estream.runtime.soc import find_soc
from tests.support.faults import make_package


def statuses(findings: list[Finding]) -> dict[str, tuple[str, str]]:
    return {finding.name: (finding.status, finding.found) for finding in findings}


def write(root: Path, files: dict[str, str]) -> Path:
    for name, text in files.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    return root


PHONE = {
    "proc/meminfo": "MemTotal:  2097152 kB\nMemAvailable: 1048576 kB\nSwapTotal: 524288 kB\n",
    "proc/cpuinfo": "processor : 0\nFeatures : fp asimddp i8mm\nHardware : Qualcomm SM8650\n",
    "sys/kernel/mm/transparent_hugepage/enabled": "always madvise [never]\n",
}


def test_machine_of_files(tmp_path: Path) -> None:
    found = statuses(machine.check_machine(write(tmp_path, PHONE)))
    assert found["memory"] == ("ok", "2.00 GiB, 1.00 GiB available, swap 512 MiB")
    assert found["processor"][1].endswith("cores, Qualcomm SM8650, asimddp i8mm")
    assert found["huge pages"] == ("warning", "never: dispatches may be slower")
    assert "cgroup" not in found and {"open files", "locked memory", "8-bit products"} < set(found)


def test_machine_that_tells_nothing(tmp_path: Path) -> None:
    found = statuses(machine.check_machine(tmp_path))
    assert found["memory"] == ("warning", "unknown")
    assert found["huge pages"][0] == "warning"


@pytest.mark.parametrize(
    ("files", "limit"),
    [
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/b/memory.max": "max\n"}, None),
        ({"proc/self/cgroup": "0::/a/b\n", "sys/fs/cgroup/a/memory.max": "1000\n"}, 1000),
        ({"proc/self/cgroup": "0::/gone\n", "sys/fs/cgroup/memory.max": "2000\n"}, 2000),
        (
            {
                "proc/self/cgroup": "3:cpu:/x\n2:memory:/m\n0::/\n",
                "sys/fs/cgroup/memory/memory.limit_in_bytes": str((1 << 63) - 4096),
                "sys/fs/cgroup/memory/m/memory.limit_in_bytes": "3000",
                "sys/fs/cgroup/memory/x/memory.limit_in_bytes": "1",
            },
            3000,
        ),
        ({}, None),
    ],
    ids=["max", "parent", "container", "version-1", "none"],
)
def test_cgroup_limit(tmp_path: Path, files: dict[str, str], limit: int | None) -> None:
    assert machine.cgroup_limit(write(tmp_path, files)) == limit


def test_few_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine.resource, "getrlimit", lambda which: (64, 64))
    found = statuses(machine.check_machine())
    assert found["open files"] == ("warning", "64")


def test_file_system_of_the_longest_mount(tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    text = f"1 0 8:1 / / rw - ext4 /dev/sda rw\n2 1 8:2 / {tmp_path} rw shared:1 - f2fs /dev/sdb rw\n"
    text += f"3 1 0:3 / {tmp_path}/a\\040b rw - fuse.sshfs host rw\nnonsense\n"
    mounts = write(tmp_path, {"mountinfo": text}) / "mountinfo"
    assert storage.file_system(tmp_path, mounts) == f"f2fs on {tmp_path}"
    assert storage.file_system(tmp_path / "a b", mounts) == f"fuse.sshfs on {tmp_path}/a b"
    assert storage.file_system(tmp_path, tmp_path / "none") == "file system unknown"


def test_storage_reads_a_sample_and_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(storage, "SAMPLE", 1 << 20)
    found = statuses(storage.check_storage(tmp_path))
    assert found["direct reads"][0] in ("ok", "warning") and "/s over 1.00 MiB" in found["read rate"][1]
    assert list(tmp_path.iterdir()) == []


def test_storage_without_direct_reads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool").write_bytes(bytes(1 << 16))
    monkeypatch.setattr("estream.flash.pool._open_direct", lambda path, fd: (None, "opening with O_DIRECT failed"))
    found = statuses(storage.check_storage(tmp_path, tmp_path / "pool"))
    assert found["direct reads"] == ("warning", "do not work: opening with O_DIRECT failed")
    assert found["read rate"][1].endswith("buffered: perhaps from memory")


def test_storage_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "pool").write_bytes(bytes(1 << 16))

    def fail(*args: object, **options: object) -> int:
        raise FlashError("reading failed: Input/output error", next_step="The storage may be failing")

    monkeypatch.setattr(storage, "load_ranges", fail)
    (direct,) = (f for f in storage.check_storage(tmp_path, tmp_path / "pool") if f.name == "direct reads")
    assert (direct.status, direct.next_step) == ("missing", "The storage may be failing")
    assert direct.fails


@pytest.mark.parametrize(
    ("script", "message"),
    [
        ("kill -SEGV $$", "the process was killed by SIGSEGV"),
        ('echo \'estream: {"version": "1"}\'; kill -ABRT $$', "the process was killed by SIGABRT"),
        ("echo cannot link; exit 3", "status 3: cannot link"),
        ('echo \'estream: {"error": "refused", "next_step": "Ask"}\'', "refused. Ask"),
        ("sleep 30", "no answer in time (asked 0.3 s)"),
    ],
)
def test_child_that_dies(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: str, message: str) -> None:
    fake = tmp_path / "python"
    fake.write_text(f"#!/bin/sh\n{'exec ' if script.startswith('sleep') else ''}{script}\n")
    fake.chmod(0o755)
    monkeypatch.setattr(sys, "executable", str(fake))
    with pytest.raises(TargetError) as raised:
        child.ask("runtime", timeout_s=0.3 if script.startswith("sleep") else 30)
    assert str(raised.value) == message


def test_child_reports_errors() -> None:
    with pytest.raises(TargetError, match=r"library /nowhere\.so cannot be loaded"):
        child.ask("qnn", "/nowhere.so")


Answers = Callable[..., dict[str, Any]]


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What child processes answer: a dictionary, or an error."""
    given: dict[str, Any] = {
        "runtime": {"version": "1.32.0", "library": "libonnxruntime.so"},
        "graphs": {"set": "cpu", "loaded": []},
    }

    def ask(what: str, *arguments: object) -> dict[str, Any]:
        answer = given.get(what, TargetError(f"{what} failed", next_step=f"Repair {what}"))
        if isinstance(answer, Exception):
            raise answer
        return dict(answer)

    for module in (software, npu, package):
        monkeypatch.setattr(module, "ask", ask)
    monkeypatch.setattr(storage, "SAMPLE", 1 << 18)
    return given


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, dict[str, Any], dict[str, dict[str, Any]]]:
    status = main.main(["doctor", *arguments, "--json"])
    answer = json.loads(capsys.readouterr().out)
    return status, answer, {finding["name"]: finding for finding in answer["findings"]}


def test_npu_is_no_condition(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    absent = TargetError("the onnxruntime_qnn package is not installed", next_step="Install onnxruntime-qnn")
    monkeypatch.setattr(npu.QnnLibraries, "find", classmethod(lambda cls, folder=None: (_ for _ in ()).throw(absent)))
    status, answer, found = run(capsys)
    assert status == 0 and answer["ok"]
    assert found["QNN provider"]["status"] == "missing"
    assert found["QNN provider"]["next_step"] == "Install onnxruntime-qnn"
    assert main.main(["doctor"]) == 0
    out = capsys.readouterr().out
    assert "[htp only]" in out and "-> Install onnxruntime-qnn" in out
    assert "target cpu works; something is missing for:" in out


def test_runtime_that_does_not_load(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    answers["runtime"] = TargetError("the process was killed by SIGILL")
    status, answer, found = run(capsys)
    assert status == 1 and not answer["ok"]
    assert found["ONNX Runtime"]["found"] == "the process was killed by SIGILL"


def test_devices_are_counted_and_a_crash_is_a_finding(answers: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    libraries = npu.QnnLibraries(Path("plugin.so"), Path("libQnnHtp.so"))
    monkeypatch.setattr(npu.QnnLibraries, "find", classmethod(lambda cls, folder=None: libraries))
    monkeypatch.setattr(npu, "simulated", lambda: False)
    answers["qnn"] = {"build": "v2.51.0.26", "api": "2.40.0"}
    answers["devices"] = {"devices": ["QNNExecutionProvider", "CPUExecutionProvider", "QNNExecutionProvider"]}
    found = statuses(npu.check_npu())
    assert found["libQnnHtp"] == ("ok", "QAIRT 2.51.0.26, interface 2.40.0, libQnnHtp.so")
    assert found["devices"] == ("ok", "a real HTP; CPUExecutionProvider, QNNExecutionProvider (2)")
    answers["devices"] = {"devices": ["CPUExecutionProvider"]}
    assert statuses(npu.check_npu())["devices"] == ("missing", "no QNNExecutionProvider among CPUExecutionProvider")
    answers["devices"] = TargetError("the process was killed by SIGSEGV")
    assert statuses(npu.check_npu())["devices"] == ("missing", "the process was killed by SIGSEGV")


def test_package_that_is_absent_or_whole_or_damaged(
    answers: dict[str, Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    status, _, found = run(capsys, str(tmp_path / "none.estream"))
    assert status == 1 and "no such folder" in found["package"]["found"]

    model = make_package(tmp_path)
    graphs = [path.stem for path in (model / "graphs" / "cpu").iterdir()]
    answers["graphs"] = {"set": "cpu-u8", "loaded": graphs}
    status, _, found = run(capsys, str(model))
    assert status == 0 and found["cpu graphs"]["found"] == f"{len(graphs)} load"
    assert found["contexts"]["next_step"] == f"estream compile {model} --soc sm8650"
    assert "reference graphs" not in found and "read rate" in found

    answers["graphs"] = {"set": "cpu", "loaded": graphs[1:]}
    status, _, found = run(capsys, str(model))
    assert status == 1 and found["cpu graphs"]["found"] == f"not there: {graphs[0]}"


def test_contexts_are_tried_one_by_one(
    answers: dict[str, Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = make_package(tmp_path)
    opened = package.Package.open(model)
    monkeypatch.setattr(package, "qairt_version", lambda library: "2.51.0")
    for soc in ("sm8650", "sm8850"):
        content = {name: f"{soc} {name}".encode() for name in file_names("expert.4x32")}
        files = {name: ContextFile.of(data) for name, data in content.items()}
        manifest = expected_manifest(opened, find_soc(soc), "2.51.0")
        manifest = dataclasses.replace(manifest, graphs={"expert.4x32": ContextEntry("0" * 64, files, {})})
        folder = model / "graphs" / "htp" / soc
        folder.mkdir(parents=True)
        for name, data in (content | {"manifest.json": manifest.to_json()}).items():
            (folder / name).write_bytes(data)
    answers["context"] = {"inputs": 7, "outputs": 1}
    told = "1 load, 49 B, QAIRT 2.51.0"
    assert statuses(package.check_contexts(opened)) == {
        "contexts sm8650": ("ok", told),
        "contexts sm8850": ("ok", told),
    }
    answers["context"] = TargetError("the process was killed by SIGSEGV")
    (first, _) = package.check_contexts(opened)
    assert (first.status, first.needed_for) == ("missing", "htp") and "killed by SIGSEGV" in first.found
    assert first.next_step is not None and first.next_step.startswith("Compile again: estream compile")


def test_never_raises_for_what_it_finds(answers: dict[str, Any], tmp_path: Path) -> None:
    broken = make_package(tmp_path)
    (broken / "model.json").write_text("{")
    assert not doctor.examine(broken).ok
