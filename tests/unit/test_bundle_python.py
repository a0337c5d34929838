"""What is left of Python and numpy is enough: with this machine's, all that runs on a phone imports and works."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import sysconfig
from collections.abc import Callable
from pathlib import Path

import numpy as np

from android import pieces
from android.runtime_part import ROOT, runtime_files

MINOR = f"lib/python{sys.version_info[0]}.{sys.version_info[1]}"
PROGRAM = """
import ctypes, hashlib, importlib, json, subprocess, sys, tempfile, threading, zlib
import numpy as np
for name in json.loads(sys.argv[1]):
    importlib.import_module(name)
assert (np.ones((3, 3)) @ np.ones((3, 3))).sum() == 27 and np.linalg.norm([3, 4]) == 5
assert np.random.default_rng(0).normal() != 0 and abs(np.fft.fft([1, 2, 3])[0]) == 6
np.testing.assert_allclose(1, 1)
print(sys.prefix, np.__file__, hashlib.sha256(b"x").hexdigest()[:6])
"""


def leave(source: Path, home: Path, below: str, wanted: Callable[[str], bool]) -> int:
    """Links to the files of a folder that a bundle would hold; returns how many it would not."""
    left_out = 0
    for path in sorted(source.rglob("*")):
        name = f"{below}/{path.relative_to(source).as_posix()}"
        if not path.is_file() or (source.name != "numpy" and "site-packages" in name):
            continue
        if wanted(name):
            (home / name).parent.mkdir(parents=True, exist_ok=True)
            (home / name).symlink_to(path)
        else:
            left_out += 1
    return left_out


def test_a_run_needs_nothing_that_is_left_out(tmp_path: Path) -> None:
    numpy = Path(np.__file__).parent
    assert leave(Path(sysconfig.get_path("stdlib")), tmp_path, MINOR, pieces.of_python) > 500
    assert leave(numpy, tmp_path, f"{MINOR}/site-packages/numpy", pieces.of_numpy) > 300
    if (numpy.parent / "numpy.libs").is_dir():  # where wheels have what Termux has in packages of their own
        (tmp_path / MINOR / "site-packages" / "numpy.libs").symlink_to(numpy.parent / "numpy.libs")
    done = subprocess.run(
        [os.path.realpath(sys.executable), "-c", PROGRAM, json.dumps(list(runtime_files()))],
        env={"PYTHONHOME": str(tmp_path), "PYTHONPATH": str(ROOT), "PYTHONDONTWRITEBYTECODE": "1", "PATH": ""},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    prefix, where, digest = done.stdout.split()
    assert (prefix, digest) == (str(tmp_path), "2d7116")
    assert where.startswith(str(tmp_path))
