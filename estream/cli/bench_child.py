"""A prefill, and the same again, in a process of its own: `python -m estream.cli.bench_child JOB`, JSON, of `bench`.

So that no strategy finds what another left: memory that was touched, graphs that are warm, a peak that was reached.
The second prefill is what is measured: the first one pays for the system's giving memory, which differs by strategy and
is not a property of any.
Prints one line `estream: {...}` among whatever native code prints. `measure` is the other side of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

MARK = "estream: "
FAILED = {"usage": False, "refused": False}
_ROOT = Path(__file__).resolve().parents[2]


def measure(job: dict[str, Any]) -> dict[str, Any]:
    """Runs a job. Returns stats and configuration of the second prefill and first_ttft_s; or error (a message), usage
    (a mistake in the call) and refused (that, or too small a budget). The last token's logits are left in the file
    job["logits"], float32 [V]."""
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, "-m", "estream.cli.bench_child", json.dumps(job)],
        env={**os.environ, "PYTHONPATH": path},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        errors="replace",
    )
    lines = [line.removeprefix(MARK) for line in done.stdout.splitlines() if line.startswith(MARK)]
    if lines:
        answer: dict[str, Any] = json.loads(lines[-1])
        return answer
    if done.returncode < 0:
        return {"error": f"the process was killed by {signal.Signals(-done.returncode).name}", **FAILED}
    return {"error": f"status {done.returncode}: {done.stderr.strip()[-300:]}", **FAILED}


def run(job: dict[str, Any]) -> dict[str, Any]:
    """The prefills of a job: package, logits, tokens, seed, and `engine`, keyword arguments of Engine."""
    import numpy as np

    from estream.cli.console import plain
    from estream.engine import Engine

    with Engine(job["package"], max_tokens=job["tokens"], **job["engine"]) as engine:
        vocab = engine.package.architecture.vocab
        ids = np.random.default_rng(job["seed"]).integers(0, vocab, job["tokens"])
        first = engine.prefill(ids).stats.ttft_s
        result = engine.prefill(ids)
    assert result.logits is not None
    np.save(job["logits"], result.logits)
    answer: dict[str, Any] = plain(
        {"stats": result.stats.to_dict(), "configuration": result.configuration, "first_ttft_s": first}
    )
    return answer


def main(arguments: list[str]) -> None:
    """Prints an answer, or the error as one."""
    from estream.errors import EStreamError, MemoryBudgetError, UsageError

    try:
        answer = run(json.loads(arguments[0]))
    except EStreamError as error:
        refused = isinstance(error, UsageError | MemoryBudgetError)
        answer = {"error": str(error), "usage": error.exit_status == 2, "refused": refused}
    print(f"\n{MARK}{json.dumps(answer)}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
