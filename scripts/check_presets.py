"""Every preset, cut to the fewest layers that have each kind of layer and two with experts: made, prefilled, measured.

    python -m scripts.check_presets --experts int4 --tokens 64 --memory 1.5GiB --work DIR

Prefills in a fresh process with the budget; exit status 1 if one does not finish, does not stay within it, or gives
logits that are not finite. Packages (up to 2 GB each) are deleted one after the other.
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np

from estream.models import family
from estream.models.base import Architecture
from estream.package.presets import PRESETS, preset_config
from estream.package.synth import synthesize
from estream.units import format_bytes, parse_size


def enough_layers(arch: Architecture) -> int:
    """The shortest start of the model with every kind of layer in it, and two layers with experts."""
    kinds = [(plan.ffn, plan.mixer, plan.window) for plan in arch.layers]
    for count in range(1, len(kinds) + 1):
        if set(kinds[:count]) == set(kinds) and sum(kind[0] == "moe" for kind in kinds[:count]) >= 2:
            return count
    return len(kinds)


def prefill(package: Path, vocab: int, tokens: int, memory: str) -> dict[str, Any]:
    """The report of `estream prefill` in a process of its own, or {"failure": ...}."""
    ids = " ".join(str(token) for token in np.random.default_rng(0).integers(0, vocab, tokens))
    command = [sys.executable, "-m", "estream", "prefill", str(package), "--ids-file", "-", "--json", "--quiet"]
    done = subprocess.run([*command, "--memory", memory], input=ids, capture_output=True, text=True)
    return {"failure": done.stderr.strip()} if done.returncode else dict(json.loads(done.stdout))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--presets", default=",".join(sorted(PRESETS)))
    parser.add_argument("--experts", default="int4")
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--memory", default="1.5GiB")
    parser.add_argument("--full", action="store_true", help="all layers")
    parser.add_argument("--work", type=Path, default=Path("."))
    args = parser.parse_args()
    wrong = 0
    for name in args.presets.split(","):
        config = preset_config(name)
        arch = family(config["model_type"]).from_config(config).architecture()
        layers = None if args.full else enough_layers(arch)
        package = args.work / f"{name}.estream"
        made = synthesize(name, package, experts=args.experts, layers=layers, force=True)
        try:
            report = prefill(package, arch.vocab, args.tokens, args.memory)
        finally:
            shutil.rmtree(package)
        peak = report.get("stats", {}).get("memory", {}).get("peak_bytes")
        ok = peak is not None and peak <= parse_size(args.memory)
        wrong += not ok
        if "failure" in report:
            print(f"{name}, {layers or len(arch.layers)} layers: {report['failure']}")
            continue
        stats = report["stats"]
        what = f"{name}, {layers or len(arch.layers)} layers, {args.experts}, {format_bytes(made.total_bytes)}"
        spent = f"{args.tokens} tokens in {stats['ttft_s']:.2f} s, peak {format_bytes(peak)} of {args.memory}"
        print(f"{what}: {spent}{'' if ok else ': NOT WITHIN IT'}", flush=True)
    sys.exit(1 if wrong else 0)


if __name__ == "__main__":
    main()
