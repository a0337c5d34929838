"""The phone's program on this machine's CPU, from `estream device` down: same logits, same errors, no process left."""

from __future__ import annotations

import json
import logging
import os
import re
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest

from android.bench import bench
from android.calibrate import kept_profile
from android.events import Measurement, PhoneError, ProtocolError
from android.run import run
from android.session import Listener, ask, request_of
from estream.cli import device as device_commands
from estream.cli.main import main
from estream.engine import Engine
from estream.errors import EStreamError, MemoryBudgetError, PackageError, PromptError, UsageError
from estream.runtime.capi import find_library
from tests.support.fake_device import FakeDevice
from tests.support.packages import packed

IDS = [3, 1, 4, 1, 5, 9, 2, 6]
OPTIONS = {"backend": "cpu", "threads": 2}


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return packed(tmp_path_factory.mktemp("model"), "olmoe")[0]


@pytest.fixture
def phone(package: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[FakeDevice]:
    """Has the package, and is what `estream device` finds."""
    fake = FakeDevice(tmp_path / "phone", runtime=find_library())
    shutil.copytree(package, Path(fake.layout.models, package.name))
    for command in device_commands.COMMANDS:
        if hasattr(command, "device_from"):
            monkeypatch.setattr(command, "device_from", lambda args: (fake, fake.layout))
    yield fake
    for process in fake.processes:
        assert process.status is not None and not process.stopped_by_force
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def runs(phone: FakeDevice) -> list[Path]:
    folder = Path(phone.layout.runs)
    return sorted(folder.iterdir()) if folder.exists() else []


def test_logits_are_the_host_s(phone: FakeDevice, package: Path) -> None:
    with Engine(package, threads=2, max_tokens=len(IDS)) as engine:
        expected = engine.prefill(IDS, hidden=True)
    steps: list[tuple[str, int, int]] = []
    opened: list[dict[str, Any]] = []
    listener = Listener(lambda *step: steps.append(step), opened.append)
    done = run(phone, phone.layout, package, IDS, OPTIONS, hidden=True, trace=True, listener=listener)  # type: ignore[arg-type]
    assert expected.logits is not None and expected.hidden is not None and done.hidden is not None
    assert done.logits.tobytes() == expected.logits.tobytes()
    assert done.hidden.tobytes() == expected.hidden.tobytes()
    assert (done.tokens, done.stats["records_read"]) == (len(IDS), expected.stats.records_read)
    assert opened == [done.configuration] == [json.loads(json.dumps(expected.configuration))]
    assert steps[-1][0] == "prefill" and steps[-1][2] == 2  # layers
    assert done.trace is not None and "traceEvents" in json.loads(done.trace)
    assert done.device["onnxruntime"] and done.device["serial"] == phone.serial
    assert runs(phone) == [] and done.folder is None


def test_the_command_reports_as_prefill_does(
    phone: FakeDevice, package: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    ids = ["--ids", " ".join(map(str, IDS)), "--threads", "2", "--json"]
    assert main(["prefill", str(package), *ids]) == 0
    expected = json.loads(capsys.readouterr().out)
    files = {name: tmp_path / name for name in ("logits.npy", "hidden.npy", "trace.json")}
    outputs = [word for name, path in files.items() for word in (f"--{name.partition('.')[0]}", str(path))]
    assert main(["device", "run", str(package), *ids, "--backend", "cpu", "--keep", *outputs]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert answer["next"] == expected["next"] and answer["configuration"] == expected["configuration"]
    assert answer.keys() - expected.keys() == {"device", "crossover"} and answer["crossover"] is None
    assert answer["stats"].keys() == expected["stats"].keys()
    (kept,) = runs(phone)
    assert answer["device"]["folder"] == str(kept)
    assert np.load(files["logits.npy"]).tobytes() == np.load(kept / "logits.npy").tobytes()
    assert np.load(files["hidden.npy"]).shape[0] == len(IDS)
    assert json.loads(files["trace.json"].read_text()) == json.loads((kept / "trace.json").read_text())
    assert json.loads((kept / "result.json").read_text())["stats"] == answer["stats"]


def test_words_for_people(phone: FakeDevice, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["device", "run", str(package), "--ids", "1 2", "--backend", "cpu", "--top", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[:2]] == ["model", "prompt"]
    assert lines[-1].startswith(f"  device  {phone.serial}, EStream ")
    assert "temperature" in lines[-1]


@pytest.mark.parametrize(
    ("ids", "options", "kind"),
    [
        ([10**6], {}, PromptError),
        (IDS, {"prefetch": "never"}, UsageError),
        (IDS, {"memory": 1}, MemoryBudgetError),
        (IDS, {"soc": "sm8650"}, UsageError),
        (IDS, {"threads": 10**6}, UsageError),
    ],
)
def test_errors_cross_intact(
    phone: FakeDevice, package: Path, ids: list[int], options: dict[str, Any], kind: type[EStreamError]
) -> None:
    with pytest.raises(kind) as expected, Engine(package, **{**OPTIONS, **options}, max_tokens=len(ids)) as engine:
        engine.prefill(ids)
    with pytest.raises(kind) as raised:
        run(phone, phone.layout, package, ids, {**OPTIONS, **options})  # type: ignore[arg-type]
    here, there = expected.value, raised.value
    assert (type(there), there.exit_status) == (type(here), here.exit_status)
    if kind is not MemoryBudgetError:  # whose figures are of the process
        assert (str(there), there.next_step) == (str(here), here.next_step)
    assert phone.processes[-1].status == here.exit_status
    assert runs(phone) == []


def test_a_damaged_copy_and_the_command_s_status(
    phone: FakeDevice, package: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    copy = Path(phone.layout.models, package.name)
    os.truncate(copy / "experts.safetensors", 1000)
    with pytest.raises(PackageError) as here:
        Engine(copy)
    command = ["device", "run", str(package), "--ids", "1", "--backend", "cpu"]
    assert main(command) == 1
    step = f"Push it again: estream device push {package.name}. If that sends nothing: estream device clean"
    told = str(PackageError(here.value.thing, asked=here.value.asked, had=here.value.had, next_step=step))
    assert f"estream: error: {told}" in capsys.readouterr().err
    shutil.rmtree(copy)
    assert main(command) == 1
    assert f"{package.name} is not on the phone" in capsys.readouterr().err
    Path(phone.layout.libraries, "libonnxruntime.so").unlink()
    shutil.copytree(package, copy)
    assert main(command) == 1
    assert "no libonnxruntime.so in" in capsys.readouterr().err


def leave(phone: FakeDevice, package: Path, error: BaseException) -> None:
    """Leaves a bench, which would take minutes, after its first measurement."""

    def measured(one: Measurement) -> None:
        raise error

    request = {**request_of(phone.layout, package, OPTIONS), "tokens": [64], "rounds": 10**6}
    ask(phone, phone.layout, "bench", request, Listener(measured=measured))  # type: ignore[arg-type]


@pytest.mark.parametrize("error", [KeyboardInterrupt(), OSError("the host's own failure")], ids=["Ctrl-C", "error"])
def test_who_stops_waiting_leaves_no_process(phone: FakeDevice, package: Path, error: BaseException) -> None:
    with pytest.raises(type(error)):
        leave(phone, package, error)
    assert phone.processes[-1].status == 143
    assert b"Traceback" not in phone.processes[-1].err


def test_ctrl_c_in_the_middle_of_the_command(
    phone: FakeDevice, package: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(*arguments: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("estream.cli.report.plan", interrupt)
    assert main(["device", "run", str(package), "--ids", "1 2 3", "--backend", "cpu"]) == 130
    assert runs(phone) == []
    assert capsys.readouterr().err.endswith("estream: interrupted\n")


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (signal.SIGKILL, "was killed, probably by Android's low-memory killer (SIGKILL, status 137)"),
        (signal.SIGSEGV, "crashed (SIGSEGV, status 139)"),
    ],
)
def test_a_program_that_is_killed(phone: FakeDevice, package: Path, number: int, words: str) -> None:
    def measured(one: Measurement) -> None:
        os.kill(phone.processes[-1].pid, number)

    request = {**request_of(phone.layout, package, OPTIONS), "tokens": [64], "rounds": 10**6}
    with pytest.raises(PhoneError) as raised:
        ask(phone, phone.layout, "bench", request, Listener(measured=measured))  # type: ignore[arg-type]
    assert words in str(raised.value)


def test_noise_from_libraries(
    phone: FakeDevice, package: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(logging.getLogger("estream"), "propagate", True)  # which the command line ends
    script = phone.python.read_text().partition("\n")[2]
    phone.write_python(f"echo 'WARNING: linker: first'\n{script}")
    engine = Path(phone.layout.app, "estream/engine.py")
    engine.write_text(f"{engine.read_text()}\nimport os\nos.write(1, b'half a line')\n")
    with caplog.at_level("INFO", "estream.device"):
        done = run(phone, phone.layout, package, IDS, OPTIONS)  # type: ignore[arg-type]
    assert done.tokens == len(IDS)
    assert "phone: WARNING: linker: first" in caplog.text and "phone: half a line" in caplog.text


@pytest.mark.parametrize(("version", "age"), [("0", "older"), ("2", "newer")])
def test_another_version_of_the_protocol(phone: FakeDevice, package: Path, version: str, age: str) -> None:
    program = Path(phone.layout.app, "estream_phone.py")
    program.write_text(program.read_text().replace("PROTOCOL = 1", f"PROTOCOL = {version}"))
    with pytest.raises(ProtocolError, match=rf"EStream on the phone is {age} than on this host.*Push the bundle again"):
        run(phone, phone.layout, package, IDS, OPTIONS)  # type: ignore[arg-type]


def test_the_soc_is_the_phone_s(phone: FakeDevice, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["device", "run", str(package), "--ids", "1"]
    assert main(command) == 1  # on the NPU, for which this phone has no libraries
    assert "libonnxruntime_providers_qnn.so was not found" in capsys.readouterr().err
    phone.properties["ro.soc.model"] = "SM7325"
    assert main(command) == 2
    assert "an SoC that is not known here (had SM7325)" in capsys.readouterr().err


def test_bench(phone: FakeDevice, package: Path, capsys: pytest.CaptureFixture[str]) -> None:
    command = ["device", "bench", str(package), "--tokens", "4,16", "--rounds", "3", "--backend", "cpu", "--json"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    assert [cell["tokens"] for cell in answer["cells"]] == [4, 16]
    for cell in answer["cells"]:
        times = sorted(one["stats"]["ttft_s"] for one in cell["measurements"])
        assert (cell["least_s"], cell["ttft_s"], cell["most_s"]) == tuple(times)
        assert cell["tokens_per_s"] == pytest.approx(cell["tokens"] / times[1])
        assert [one["round"] for one in cell["measurements"]] == [0, 1, 2]
    assert answer["configuration"]["max_tokens"] == 16
    cells, *_ = bench(phone, phone.layout, package, [4], 1, OPTIONS)  # type: ignore[arg-type]
    module: ModuleType = device_commands.bench
    lines = module.table(cells).splitlines()
    assert len(lines) == 2 and lines[1].split()[0] == "4"


def test_calibrate_keeps_the_profile(
    phone: FakeDevice,
    package: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("ESTREAM_CACHE", str(tmp_path / "cache"))
    monkeypatch.chdir(tmp_path)
    for name, constants in (("run", r"_READ_S, _ROUND_S = .*"), ("reads", r"WARM_S = .*"), ("shape", r"SECONDS = .*")):
        file = Path(phone.layout.app, f"estream/calibrate/{name}.py")  # as quick as it can be
        quick = "_READ_S, _ROUND_S = 0.02, 0.02" if name == "run" else f"{constants.split()[0]} = 0.01"
        text, count = re.subn(f"(?m)^{constants}$", quick, file.read_text())
        assert count == 1
        file.write_text(text)
    command = ["device", "calibrate", str(package), "--backend", "cpu", "--threads", "2", "--json"]
    assert main(command) == 0
    answer = json.loads(capsys.readouterr().out)
    kept = kept_profile(phone.serial, "cpu", tmp_path / "cache")
    assert kept is not None and str(answer["profile"]).endswith("phone-FAKE_1-cpu.json")
    assert kept.machine["backend"] == "cpu" and len(kept.shapes) == 1
    on_phone = list(Path(phone.layout.root, ".cache/estream/profiles").iterdir())
    assert len(on_phone) == 1
    assert main(["plan", str(package), "--tokens", "16", "--profile", answer["profile"], "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["machine"] == dict(kept.machine)
    # The phone's engine finds its own profile, and chooses by it.
    done = run(phone, phone.layout, package, IDS, OPTIONS)  # type: ignore[arg-type]
    assert done.configuration["tuned"] is True


def test_ids_from_a_file_and_the_largest_logits(phone: FakeDevice, package: Path, tmp_path: Path) -> None:
    ids, out = tmp_path / "ids.json", tmp_path / "out"
    ids.write_text(json.dumps(IDS))
    request = {**request_of(phone.layout, package, OPTIONS), "ids_file": str(ids), "out": str(out), "top": 3}
    answer = ask(phone, phone.layout, "run", request)  # type: ignore[arg-type]
    logits = np.load(out / "logits.npy")
    best = [token["id"] for token in answer.fields["top"]]
    assert best == np.argsort(-logits)[:3].tolist()
    assert [token["logit"] for token in answer.fields["top"]] == logits[best].tolist()
    assert answer.fields["files"] == ["logits.npy"]
