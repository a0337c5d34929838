"""The run-time part starts where only numpy is installed, as on a phone."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from android.runtime_part import ROOT, runtime_files

# Runs in a fresh interpreter: argv = root, allowed third-party packages (JSON), modules to import (JSON).
PROBE = """
import importlib, json, sys
root, allowed, modules = sys.argv[1], json.loads(sys.argv[2]), json.loads(sys.argv[3])
sys.path.insert(0, root)
allowed = set(allowed) | {"estream"} | set(sys.stdlib_module_names)

class Blocker:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in allowed:
            raise ModuleNotFoundError(f"blocked: {name}", name=name)
        return None

for name in [name for name in sys.modules if name.partition(".")[0] not in allowed and name != "__main__"]:
    del sys.modules[name]  # what .pth files of the environment brought in
sys.meta_path.insert(0, Blocker())
failed = {}
for name in modules:
    try:
        importlib.import_module(name)
    except ImportError as error:
        failed[name] = str(error)
print(json.dumps(failed))
"""


def probe(modules: list[str], third_party: list[str]) -> dict[str, str]:
    """Module name → why it does not import with only `third_party` installed."""
    command = [sys.executable, "-I", "-c", PROBE, str(ROOT), json.dumps(third_party), json.dumps(modules)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    failed: dict[str, str] = json.loads(done.stdout)
    return failed


def test_finds_the_modules_of_every_part() -> None:
    modules = list(runtime_files())
    for part in ("engine", "errors", "routing", "flash.machine", "package.reader", "runtime.cpu", "models.olmoe"):
        assert f"estream.{part}" in modules
    assert not any(name.startswith("estream.cli") for name in modules)


@pytest.mark.parametrize("third_party", [["numpy"], ["numpy", "psutil"]], ids=["numpy", "numpy+psutil"])
def test_run_time_part_imports(third_party: list[str]) -> None:
    assert probe(list(runtime_files()), third_party) == {}


def test_blocker_blocks() -> None:
    failed = probe(["numpy", "onnx", "rich"], [])
    assert set(failed) == {"numpy", "onnx", "rich"}
    assert all(reason.startswith("blocked: ") for reason in failed.values())
