"""Packing that is killed, interrupted or runs out of disk: the old package or none, and the next packing cleans up."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from estream.errors import PackageError
from estream.package.pack import pack
from estream.package.verify import verify
from tests.support.tiny_packages import QWEN2_MOE, write_checkpoint

ROOT = Path(__file__).resolve().parents[2]
ENVIRONMENT = {**os.environ, "PYTHONPATH": str(ROOT), "PYTHONUNBUFFERED": "1"}

# Imports once, then forks one packing per point: the child kills itself before its n-th system call of those counted.
KILLED = """
import json, os, shutil, signal, sys
from estream.package import atomic
from estream.package.pack import pack
from estream.package.verify import verify
from pathlib import Path
import qnn_graphs
import estream.checkpoint
import estream.checkpoint.tokenizer

folder, points = Path(sys.argv[1]), int(sys.argv[2])
checkpoint, out = folder / "checkpoint", folder / "out" / "m.estream"

def packing(kill_at):
    calls = 0
    def counted(real):
        def call(*args, **options):
            nonlocal calls
            calls += 1
            if calls == kill_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return real(*args, **options)
        return call
    for name in ("write", "fsync", "mkdir", "rename", "rmdir", "unlink", "open"):
        setattr(os, name, counted(getattr(os, name)))
    atomic._exchange = counted(atomic._exchange)
    pack(checkpoint, out, experts="int8", panel=32, force=True)
    return calls

def in_child(kill_at):
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        calls = packing(kill_at)
        os.fdopen(write, "w").write(str(calls))
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        text = pipe.read()
    status = os.waitpid(child, 0)[1]
    return os.WTERMSIG(status) if os.WIFSIGNALED(status) else int(text or -1)

def state():
    found = "absent" if not os.path.lexists(out) else "whole" if verify(out).ok else "damaged"
    return {"out": found, "entries": len(os.listdir(out.parent)) if out.parent.is_dir() else 0}

report = []
for old in (False, True):
    if old:
        pack(checkpoint, out, experts="f32", force=True)
    total = in_child(0)
    # Evenly spread over the packing, and each of the last calls, where the replacement happens.
    spread = range(1, total, max(1, total // points))
    for kill_at in (*spread, *range(total - 4, total + 1)):
        if not old:
            shutil.rmtree(out, ignore_errors=True)
        died = in_child(kill_at)
        report.append({"old": old, "at": kill_at, "of": total, "died": died, **state()})
    in_child(0)
    report.append({"old": True, "at": 0, "died": signal.SIGKILL, "cleaned": len(os.listdir(out.parent)), **state()})
print(json.dumps(report))
"""


def make_checkpoint(folder: Path, **config: int) -> None:
    write_checkpoint(folder / "checkpoint", {**QWEN2_MOE, **config})
    (folder / "checkpoint" / "tokenizer.json").unlink()  # it is no real one


def test_killed_at_many_points(tmp_path: Path) -> None:
    make_checkpoint(tmp_path, num_hidden_layers=2)
    done = subprocess.run(
        [sys.executable, "-c", KILLED, str(tmp_path), "6"], capture_output=True, env=ENVIRONMENT, timeout=300
    )
    assert done.returncode == 0, done.stderr.decode()
    report = json.loads(done.stdout)
    assert len(report) > 2 * 6
    for case in report:
        assert case["died"] == signal.SIGKILL, case
        assert case["out"] in (("whole",) if case["old"] else ("whole", "absent")), case
        # At most one folder is left over: each packing removes what the one before it left.
        assert case["entries"] <= (case["out"] == "whole") + 1, case
        assert case.get("cleaned", 1) == 1, case
    assert any(case["entries"] > (case["out"] == "whole") for case in report)


@pytest.mark.parametrize("force", [False, True])
@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EDQUOT, errno.EIO])
def test_write_that_fails(tmp_path: Path, code: int, force: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    make_checkpoint(tmp_path)
    out = tmp_path / "out" / "m.estream"
    out.parent.mkdir()
    if force:
        pack(tmp_path / "checkpoint", out, experts="int8")
    write, count, failing = os.write, 0, 0

    def full(fd: int, data: memoryview) -> int:
        nonlocal count
        count += 1
        if count >= failing > 0:
            raise OSError(code, os.strerror(code))
        return write(fd, data[: max(1, len(data) - 5)])  # and short writes on the way

    monkeypatch.setattr(os, "write", full)
    reason = "packing failed: Input/output error" if code == errno.EIO else "no space left on the device.*Free some"
    for failing in (1, 2, 30, 90):  # noqa: B007 (read by full)
        count = 0
        with pytest.raises(PackageError, match=reason):
            pack(tmp_path / "checkpoint", out, experts="f32", force=force)
        assert os.listdir(out.parent) == (["m.estream"] if force else [])
    if force:
        assert verify(out).ok


def start(code: str, *arguments: str) -> subprocess.Popen[str]:
    """The command line in a process, after `code`; `ready()` is for `code` to say where the middle is."""
    program = (
        "import sys, time\n"
        "def ready():\n    print('ready', flush=True)\n    time.sleep(60)\n"
        f"{code}\n"
        "from estream.cli.main import main\nsys.exit(main(sys.argv[1:]))"
    )
    return subprocess.Popen(
        [sys.executable, "-c", program, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env=ENVIRONMENT,
    )


def interrupted(process: subprocess.Popen[str], number: int = signal.SIGINT) -> tuple[int, str]:
    """Ctrl-C, or another signal, once it is in the middle: (exit status, stderr)."""
    assert process.stdout is not None
    while (line := process.stdout.readline()) not in ("ready\n", ""):
        pass
    assert line, process.communicate()[1]
    process.send_signal(number)
    _, err = process.communicate(timeout=60)
    return process.returncode, err


PACK_STOPS = """
from estream.package.files import HashedFile
write, calls = HashedFile.write, []
def stopping(self, piece):
    calls.append(1)
    if len(calls) == 20:
        ready()
    write(self, piece)
HashedFile.write = stopping
"""


@pytest.mark.parametrize(
    ("number", "status", "said"), [(signal.SIGINT, 130, "interrupted"), (signal.SIGTERM, 143, "terminated")]
)
def test_interrupted_pack(tmp_path: Path, number: int, status: int, said: str) -> None:
    make_checkpoint(tmp_path)
    (tmp_path / "out").mkdir()
    process = start(PACK_STOPS, "pack", str(tmp_path / "checkpoint"), str(tmp_path / "out" / "m.estream"))
    assert interrupted(process, number) == (status, f"estream: {said}\n")
    assert os.listdir(tmp_path / "out") == []


PREFILL_STOPS = """
from estream.layers.experts import ExpertRunner
run, calls = ExpertRunner.run, []
def stopping(self, tile, *least):
    calls.append(1)
    if len(calls) == 5:
        ready()
    run(self, tile, *least)
ExpertRunner.run = stopping
"""


def test_interrupted_prefill(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    package, out = tmp_path / "m.estream", tmp_path / "out"
    pack(tmp_path / "checkpoint", package, experts="int8")
    out.mkdir()
    outputs = ("--all-logits", str(out / "l.npy"), "--trace", str(out / "t.json"))
    process = start(PREFILL_STOPS, "prefill", str(package), "--ids", "1 2 3", *outputs)
    assert interrupted(process) == (130, "estream: interrupted\n")
    assert os.listdir(out) == []


def test_real_file_size_limit(tmp_path: Path) -> None:
    """RLIMIT_FSIZE: the kernel refuses in the middle of the pool file."""
    make_checkpoint(tmp_path)
    (tmp_path / "out").mkdir()
    limit = "import resource\nresource.setrlimit(resource.RLIMIT_FSIZE, (200_000, 200_000))"
    process = start(
        limit, "pack", str(tmp_path / "checkpoint"), str(tmp_path / "out" / "m.estream"), "--experts", "f32"
    )
    out, err = process.communicate(timeout=60)
    assert (process.returncode, out) == (1, "")
    assert err.startswith(f"estream: error: {tmp_path}/out/m.estream: packing failed: File too large. Check ")
    assert len(err.splitlines()) == 1
    assert os.listdir(tmp_path / "out") == []


def test_two_processes_on_one_package(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    package = tmp_path / "m.estream"
    pack(tmp_path / "checkpoint", package, experts="int8")
    arguments = ("prefill", str(package), "--ids", "1 2 3 4 5", "--json", "--verify-reads", "--threads", "1")
    processes = [start("", *arguments) for _ in range(2)]
    answers = [json.loads(process.communicate(timeout=60)[0]) for process in processes]
    assert [process.returncode for process in processes] == [0, 0]
    assert answers[0]["next"] == answers[1]["next"] and len(answers[0]["next"]) == 5


def test_nothing_is_left_in_the_home_folder(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    pack(tmp_path / "checkpoint", tmp_path / "m.estream", experts="int8")
    home = tmp_path / "home"
    home.mkdir()
    kept = {key: value for key, value in ENVIRONMENT.items() if not key.startswith(("XDG_", "ORT_"))}
    command = [sys.executable, "-m", "estream", "prefill", str(tmp_path / "m.estream"), "--ids", "1 2 3", "-q"]
    done = subprocess.run(command, env={**kept, "HOME": str(home)}, cwd=home, capture_output=True, timeout=60)
    assert (done.returncode, done.stderr) == (0, b"")
    assert [str(path) for path in home.rglob("*")] == []


def test_output_that_nobody_reads_to_the_end(tmp_path: Path) -> None:
    make_checkpoint(tmp_path)
    pack(tmp_path / "checkpoint", tmp_path / "m.estream", experts="int8")
    line = f'"{sys.executable}" -m estream inspect "{tmp_path}/m.estream" -v | head -1; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stdout == f"{tmp_path}/m.estream: packed model\n"
    assert done.stderr == "" and done.returncode in (0, 141)
    line = f'"{sys.executable}" -m estream prefill --help | true; exit ${{PIPESTATUS[0]}}'
    done = subprocess.run(["bash", "-c", line], capture_output=True, text=True, env=ENVIRONMENT, timeout=60)
    assert done.stderr == "" and done.returncode in (0, 141)
