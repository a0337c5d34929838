"""One measurement in a process of its own: a job as JSON on stdin, what was measured as JSON on stdout.

The process's high-water mark of memory is then the run's. Between opening the engine and the prefill it is idle for
IDLE_S: a rate limit gives credit by slices of 0.1 s, and what opening left of one is chance. No warm-up.
"""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from estream import Engine
from estream.errors import EStreamError
from estream.package.reader import Package
from estream.quality import perplexity, split_windows
from estream.streams import keep_stdout_ours

IDLE_S = 0.3
ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Job:
    """kind: "prefill" of `tokens` tokens, or "perplexity" in windows of so many. text: a file whose tokens are the
    prompt, over and over until it is long enough; None: random tokens. options: of Engine, the strategy included."""

    kind: str
    package: str
    tokens: int
    text: str | None
    options: dict[str, Any] = field(default_factory=dict)


def measure(job: Job) -> dict[str, Any]:
    """What was measured, or {"refused": message}. Errors that are no EStreamError are not caught."""
    try:
        return _prefill(job) if job.kind == "prefill" else _perplexity(job)
    except EStreamError as error:
        return {"refused": str(error)}


def run_apart(job: Job, enter: Callable[[], None] | None = None) -> dict[str, Any]:
    """`measure` in a fresh process, which `enter` moves into its control group; {"failed": ...} where it dies."""
    done = subprocess.run(
        [sys.executable, "-m", "scripts.bench.one_run"],
        input=json.dumps(asdict(job)),
        capture_output=True,
        text=True,
        cwd=ROOT,
        preexec_fn=enter,
    )
    if done.returncode != 0:
        lines = done.stderr.strip().splitlines()
        return {"failed": f"status {done.returncode}: {lines[-1] if lines else 'said nothing'}"}
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def _prefill(job: Job) -> dict[str, Any]:
    ids = prompt_of(job)
    with Engine(job.package, max_tokens=job.tokens, **job.options) as engine:
        time.sleep(IDLE_S)
        result = engine.prefill(ids)
        return {"stats": result.stats.to_dict(), "configuration": result.configuration}


def _perplexity(job: Job) -> dict[str, Any]:
    windows = split_windows(text_ids(job), job.tokens)
    with Engine(job.package, max_tokens=len(windows[0]), **job.options) as engine:
        return {"quality": asdict(perplexity(engine, windows))}


def prompt_of(job: Job) -> np.ndarray:
    """Token ids, int64 [job.tokens]."""
    if job.text is None:
        vocab = Package.open(job.package).architecture.vocab
        return np.random.default_rng(0).integers(0, vocab, job.tokens)
    return np.resize(np.array(text_ids(job), np.int64), job.tokens)


def text_ids(job: Job) -> list[int]:
    """All tokens of the text."""
    from estream.checkpoint.tokenizer import Tokenizer

    assert job.text is not None
    return Tokenizer.open(job.package).encode(Path(job.text).read_text(encoding="utf-8"))


def main() -> None:
    keep_stdout_ours()
    json.dump(measure(Job(**json.load(sys.stdin))), sys.stdout)
    sys.stdout.flush()


if __name__ == "__main__":
    main()
