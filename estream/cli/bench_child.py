"""One measurement in a process of its own: a job as JSON on stdin, what was measured as JSON on stdout.

So that no strategy finds what another left: memory that was touched, graphs that are warm, a peak that was reached.
The second prefill is what is measured: the first one pays for the system's giving memory, which differs by strategy and
is not a property of any. Before each the process is idle for IDLE_S: a rate limit gives credit by slices of 0.1 s, and
what was left of one is chance. `run_apart` is the other side of it.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

IDLE_S = 0.3
_CHILD = ("-m", "estream.cli.bench_child")
_ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """Two prefills of the token ids; or, where `window` is given, the perplexity of the ids in windows of so many.

    options: keywords of Engine, JSON values. first: tokens of the first prefill, at most all; None: all. logits: a file
    to write the last token's logits to, float32 [V], .npy.
    """

    package: str
    ids: list[int]
    options: dict[str, Any] = field(default_factory=dict)
    window: int | None = None
    first: int | None = None
    logits: str | None = None


def run_apart(job: Job, enter: Callable[[], None] | None = None) -> dict[str, Any]:
    """Measures in a fresh process, which `enter` moves into its control group.

    Returns stats and configuration of the second prefill and first_ttft_s; or quality, as a dict; or refused, a
    message, and usage: a mistake in the call, and not a budget too small; or failed, a message.
    """
    path = os.pathsep.join(filter(None, (str(_ROOT), os.environ.get("PYTHONPATH"))))
    done = subprocess.run(
        [sys.executable, *_CHILD],
        input=json.dumps(asdict(job)),
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
        errors="replace",
        preexec_fn=enter,
    )
    if done.returncode < 0:
        return {"failed": f"the process was killed by {signal.Signals(-done.returncode).name}"}
    if done.returncode > 0:
        lines = done.stderr.strip().splitlines()
        return {"failed": f"status {done.returncode}: {lines[-1] if lines else 'said nothing'}"}
    answer: dict[str, Any] = json.loads(done.stdout)
    return answer


def measure(job: Job) -> dict[str, Any]:
    """What `run_apart` returns. Errors that are no EStreamError are not caught."""
    from estream.errors import EStreamError, MemoryBudgetError, UsageError

    try:
        return _prefill(job) if job.window is None else _perplexity(job, job.window)
    except (UsageError, MemoryBudgetError) as error:
        return {"refused": str(error), "usage": isinstance(error, UsageError)}
    except EStreamError as error:
        return {"failed": str(error)}


def _prefill(job: Job) -> dict[str, Any]:
    import numpy as np

    from estream.cli.console import plain
    from estream.engine import Engine

    with Engine(job.package, max_tokens=len(job.ids), **job.options) as engine:
        time.sleep(IDLE_S)
        first = engine.prefill(job.ids[: job.first]).stats.ttft_s
        time.sleep(IDLE_S)
        result = engine.prefill(job.ids)
    if job.logits is not None:
        assert result.logits is not None
        np.save(job.logits, result.logits)
    answer: dict[str, Any] = plain(
        {"stats": result.stats.to_dict(), "configuration": result.configuration, "first_ttft_s": first}
    )
    return answer


def _perplexity(job: Job, window: int) -> dict[str, Any]:
    from estream.cli.console import plain
    from estream.engine import Engine
    from estream.quality import perplexity, split_windows

    windows = split_windows(job.ids, window)
    with Engine(job.package, max_tokens=len(windows[0]), **job.options) as engine:
        answer: dict[str, Any] = plain({"quality": asdict(perplexity(engine, windows))})
    return answer


def main() -> None:
    """Prints an answer, and nothing else."""
    from estream.streams import keep_stdout_ours

    keep_stdout_ours()
    json.dump(measure(Job(**json.load(sys.stdin))), sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
