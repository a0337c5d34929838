"""Prefills inside a memory cgroup without swap: does the promise hold, and what did it cost?

    python -m scripts.bench_memory olmoe.estream --limit 1.2GiB --tokens 512

Drops the page cache first (pages that another process cached are not charged to the group). Works with cgroup
versions 1 and 2; needs root. Exit status 1 when the prefill does not complete or does not read what it needs.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from estream.units import format_bytes, parse_size
from scripts.bench.cgroups import Cgroup


def drop_page_cache() -> None:
    """Writes dirty pages and forgets clean ones. Needs root."""
    os.sync()
    Path("/proc/sys/vm/drop_caches").write_text("3\n")


def prefill_within(package: Path, limit: int, tokens: int, extra: list[str]) -> dict[str, Any]:
    """Runs `estream prefill` in a fresh process inside the limit; its report and the group's own peak."""
    vocab = json.loads((package / "model.json").read_text())["config"]["vocab_size"]
    ids = " ".join(str(i) for i in np.random.default_rng(0).integers(0, vocab, tokens))
    drop_page_cache()
    with Cgroup("estream-memory", memory=limit) as group:
        done = subprocess.run(
            [sys.executable, "-m", "estream", "prefill", str(package), "--ids-file", "-", "--json", "--quiet", *extra],
            input=ids,
            capture_output=True,
            text=True,
            preexec_fn=group.enter,
        )
        peak = group.memory_peak()
    if done.returncode != 0:
        raise SystemExit(f"prefill ended with status {done.returncode}: {done.stderr.strip() or 'killed'}")
    report: dict[str, Any] = json.loads(done.stdout)
    return {"limit_bytes": limit, "tokens": tokens, "cgroup_peak_bytes": peak, **report}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("package", type=Path)
    parser.add_argument("--limit", default="1.2GiB")
    parser.add_argument("--tokens", type=int, default=512)
    parser.add_argument("--out", type=Path, help="write JSON here")
    options, extra = parser.parse_known_args()
    report = prefill_within(options.package, parse_size(options.limit), options.tokens, extra)
    if options.out:
        options.out.write_text(json.dumps(report, indent=1))
    stats, memory = report["stats"], report["stats"]["memory"]
    record = json.loads((options.package / "model.json").read_text())["pool"]["record_bytes"]
    needed = stats["records_needed"] * record
    print(f"{options.package.name}: {options.tokens} tokens inside {format_bytes(report['limit_bytes'])} without swap")
    print(f"  cgroup peak {format_bytes(report['cgroup_peak_bytes'] or 0)} (page cache included)")
    print(f"  process peak {format_bytes(memory['peak_bytes'])}, arena {format_bytes(memory['arena_bytes'])}")
    print(f"  read {format_bytes(stats['bytes_read'])} for {format_bytes(needed)} of needed records")
    print(f"  ttft {stats['ttft_s']:.2f} s, waited for flash {stats['flash_wait_s']:.2f} s")
    if abs(stats["bytes_read"] - needed) > 0.01 * needed:
        raise SystemExit("bytes read differ from the needed records by more than 1 %")


if __name__ == "__main__":
    main()
