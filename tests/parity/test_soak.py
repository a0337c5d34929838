"""A short soak: the long one is scripts/soak.py by hand."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


def soak(*arguments: str, code: str = "") -> subprocess.CompletedProcess[str]:
    """Runs the script, after `code` has changed something in its process."""
    program = f"import runpy, sys\nsys.path.insert(0, {str(ROOT)!r})\n{code}\n" + (
        f"sys.argv = ['soak.py', *{list(arguments)!r}]\nrunpy.run_path({str(ROOT / 'scripts' / 'soak.py')!r}, "
        "run_name='__main__')"
    )
    return subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, env={**os.environ}
    )


def test_fifty_prefills_leave_nothing() -> None:
    done = soak("--prefills", "50")
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == "nothing grew"


def test_the_soak_sees_leaks() -> None:
    """The same with 1 MiB, a thread and a file leaked by each prefill."""
    leak = """
import os, threading
from estream.layers.state import State
set_keys, kept = State.set_keys, []
def leaking(self, total):
    kept.append((bytearray(os.urandom(1 << 20)), os.open(os.devnull, os.O_RDONLY)))
    if len(kept) < 40:
        threading.Thread(target=threading.Event().wait, daemon=True).start()
    set_keys(self, total)
State.set_keys = leaking
"""
    done = soak("--prefills", "16", code=leak)
    assert done.returncode == 1, done.stderr
    assert done.stdout.splitlines()[-1] == "grown: memory, threads, open files"
