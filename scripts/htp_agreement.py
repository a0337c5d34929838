#!/usr/bin/env python3
"""Does the NPU say what the CPU reference says? The derived model on a fixed text of 256 tokens, in the simulator.

    scripts/htp_agreement.py                  # makes int8 and int4 packages in .demo, then compares each (10 minutes)
    scripts/htp_agreement.py A.estream ...    # compares these packages of the derived model

Per package: " Paris" first after "The capital of France is"; over the text, as `estream perplexity --agreement` has it,
perplexity within 1 % of the reference lowering of the same package (dequantise, then float32) and the same first token
at 97 % of the positions at least.
Exit status: 0 all hold, 1 one does not.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the checkout, installed or not

import estream
from estream import Engine
from estream.errors import EStreamError
from estream.quality import agreement, split_windows
from estream.streams import keep_stdout_ours
from scripts.derive import folder, llama_gguf, source, texts, tokenizer
from scripts.derive_demo_model import derive

ROOT = Path(__file__).resolve().parents[1]
EXPERTS, TOP_K = 8, 6
PROMPT, ANSWER = "The capital of France is", " Paris"
MOST_PERPLEXITY, LEAST_SAME = 0.01, 0.97


@dataclass(frozen=True)
class Agreement:
    """One package. change, same, divergence: as `estream.quality.Agreement` has them."""

    package: str
    experts: str
    dense: str
    soc: str
    tokens: int
    first: str
    perplexity: float
    reference: float
    change: float
    same: float
    divergence: float
    seconds: float

    @property
    def holds(self) -> bool:
        return abs(self.change) <= MOST_PERPLEXITY and self.same >= LEAST_SAME and self.first == ANSWER


def make(work: Path, cache: Path) -> list[Path]:
    """int8 and int4 packages of the derived model, made if they are not there."""
    checkpoint = work / "checkpoint"
    derive(checkpoint, cache, experts=EXPERTS, top_k=TOP_K)
    packages = []
    for scheme in ("int8", "int4"):
        package, stamp = work / f"htp-{scheme}.estream", work / f"htp-{scheme}.packed-from.json"
        origin = (checkpoint / folder.STAMP).read_bytes()
        if not (package.exists() and stamp.exists() and stamp.read_bytes() == origin):
            stamp.unlink(missing_ok=True)
            estream.pack(checkpoint, package, experts=scheme, force=True)
            stamp.write_bytes(origin)
        packages.append(package)
    return packages


def compare(path: Path, ids: list[int], prompt: list[int], vocabulary: tokenizer.Tokenizer) -> Agreement:
    """Prefills the text with both, and the prompt on htp. seconds: both runs of the text."""
    started = time.perf_counter()
    quality, near = agreement(
        partial(Engine, path, "htp", max_tokens=len(ids)),
        partial(Engine, path, reference=True, max_tokens=len(ids)),
        split_windows(ids, len(ids)),
    )
    seconds = time.perf_counter() - started
    with Engine(path, "htp", max_tokens=len(prompt)) as engine:
        last, manifest = engine.prefill(prompt).logits, engine.package.manifest
    assert last is not None
    return Agreement(
        package=str(path),
        experts=manifest.experts,
        dense=manifest.dense,
        soc=str(quality.configuration["soc"]),
        tokens=quality.tokens,
        first=vocabulary.decode([int(np.argmax(last))]),
        perplexity=quality.perplexity,
        reference=near.reference.perplexity,
        change=near.change,
        same=near.same,
        divergence=near.divergence,
        seconds=seconds,
    )


def line(one: Agreement) -> str:
    """What one package gave, for people."""
    return (
        f"{Path(one.package).name}: experts {one.experts}, dense {one.dense}; {one.soc}, simulated; "
        f"{one.tokens} tokens; first {one.first!r}; perplexity {one.perplexity:.3f}, reference {one.reference:.3f} "
        f"({one.change:+.2%}, limit {MOST_PERPLEXITY:.0%}); same first token {one.same:.1%} "
        f"(at least {LEAST_SAME:.0%}); divergence {one.divergence:.2g} nats; {one.seconds:.0f} s: "
        f"{'ok' if one.holds else 'FAILED'}"
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", metavar="PACKAGE", type=Path, nargs="*")
    parser.add_argument("--work", metavar="DIR", type=Path, default=ROOT / ".demo")
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where the download is kept (default: WORK/cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    keep_stdout_ours()
    cache, found = args.cache or args.work / "cache", []
    try:
        packages = args.packages or make(args.work, cache)
        words = tokenizer.build(llama_gguf.read(source.fetch(cache).gguf).vocabulary)
        ids, prompt = texts.evaluation(words), words.encode(PROMPT).ids
        for path in packages:
            one = compare(path, ids, prompt, words)
            found.append(one)
            if not args.json:
                print(line(one), flush=True)
    except EStreamError as error:
        print(f"htp_agreement: {error}", file=sys.stderr)
        return error.exit_status
    if args.json:
        print(json.dumps([asdict(one) | {"holds": one.holds} for one in found]))
    return int(not all(one.holds for one in found))


if __name__ == "__main__":
    sys.exit(main())
