#!/usr/bin/env python3
"""Checks packed packages of the derived model against the dense SmolLM2-135M, computed independently in numpy.

    scripts/check_demo_model.py                 # makes what is missing in the work folder, then checks everything
    scripts/check_demo_model.py A.estream ...   # checks what these packages allow; the rest is shown as not checked

Criteria, on a fixed text of 256 tokens:
  f32, top-k = E:        max |logits - dense| within 1e-3 of the dense logits' range, perplexity within 0.1 %
  int8, default top-k:   perplexity against the f32 package with the same top-k, within 2 % in the reference lowering
                         (what the weights cost), within 6 % as it runs (8 bits for each row of activations as well)
The last one finds what is broken, not what is a little worse: over so few tokens the difference has a standard error of
2.5 %. docs/selftest.md has the figures.
Exit status: 0 all checked criteria hold, 1 one does not, 2 nothing to check.
"""

from __future__ import annotations

import argparse
import json
import sys
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # runs from the checkout, installed or not

import estream
from estream import Engine
from estream.errors import EStreamError, UsageError
from estream.package.reader import Package
from estream.quality import perplexity_of
from estream.selftest.run import has_reference
from scripts.derive import NAME, dense_llama, folder, llama_gguf, source, texts, tokenizer
from scripts.derive_demo_model import derive

ROOT = Path(__file__).resolve().parents[1]
EXPERTS, TOP_K = 8, 6


@dataclass(frozen=True)
class Measured:
    """One package on the evaluation text. `difference`: max |logits - dense| over the dense range. `reference`: the
    perplexity of the reference lowering; None for an f32 package, and where the package has no such graphs."""

    package: str
    scheme: str
    experts: int
    top_k: int
    perplexity: float
    difference: float
    reference: float | None


@dataclass(frozen=True)
class Criterion:
    """`had` and `passed` are None where no package allows the check."""

    name: str
    limit: float
    had: float | None

    @property
    def passed(self) -> bool | None:
        return None if self.had is None else self.had <= self.limit


def make(work: Path, cache: Path) -> list[Path]:
    """The packages in `work`: f32 and int8, each with top-k = E and the default top-k. Those packed from the present
    checkpoints are kept; the stamp beside each is the same that scripts/demo.sh writes."""
    default, exact = work / "checkpoint", work / "checkpoint-exact"
    derive(default, cache, experts=EXPERTS, top_k=TOP_K)
    derive(exact, cache, experts=EXPERTS, top_k=EXPERTS, weights_of=default)
    packages = []
    for checkpoint, name, scheme in (
        (exact, "exact-f32", "f32"),
        (exact, "exact-int8", "int8"),  # no criterion: shows what int8 costs apart from changes of routing
        (default, "f32", "f32"),
        (default, "int8", "int8"),
    ):
        package, stamp = work / f"{name}.estream", work / f"{name}.packed-from.json"
        origin = (checkpoint / folder.STAMP).read_bytes()
        if not (package.exists() and stamp.exists() and stamp.read_bytes() == origin):
            print(f"packing {package}", file=sys.stderr, flush=True)
            stamp.unlink(missing_ok=True)
            estream.pack(checkpoint, package, experts=scheme, force=True)
            stamp.write_bytes(origin)
        packages.append(package)
    return packages


def measure(path: Path, ids: list[int], dense: np.ndarray) -> Measured:
    """Prefills `ids` and compares with the dense logits [N, V]."""
    package = Package.open(path)
    found = logits_of(path, ids, dense.shape)
    quantised = package.pool.panel.scheme != "f32" and has_reference(package)
    return Measured(
        package=str(path),
        scheme=package.pool.panel.scheme,
        experts=package.architecture.experts,
        top_k=package.architecture.top_k,
        perplexity=perplexity_of(found, ids),
        difference=float(np.abs(found - dense).max() / np.ptp(dense)),
        reference=perplexity_of(logits_of(path, ids, dense.shape, reference=True), ids) if quantised else None,
    )


def logits_of(path: Path, ids: list[int], shape: tuple[int, ...], *, reference: bool = False) -> np.ndarray:
    """Of every token, float32 [N, V]. Raises EStreamError where that is not `shape`."""
    with Engine(path, reference=reference, max_tokens=len(ids)) as engine:
        found = engine.prefill(ids, logits="all").logits
    if found is None or found.shape != shape:
        raise EStreamError(
            f"{path}: logits",
            asked=shape,
            had=None if found is None else found.shape,
            next_step=f"Give packages of the {NAME}",
        )
    return found


def criteria(measured: list[Measured], dense_perplexity: float) -> list[Criterion]:
    """The acceptance criteria with what was measured; the worst package counts."""
    exact = [m for m in measured if m.scheme == "f32" and m.top_k == m.experts]
    f32 = {m.top_k: m.perplexity for m in measured if m.scheme == "f32" and m.top_k < m.experts}
    int8 = [m for m in measured if m.scheme == "int8" and m.top_k in f32]
    return [
        Criterion(
            "f32, top-k = E: max |logits - dense| / range", 1e-3, max((m.difference for m in exact), default=None)
        ),
        Criterion(
            "f32, top-k = E: |perplexity / dense - 1|",
            1e-3,
            max((abs(m.perplexity / dense_perplexity - 1) for m in exact), default=None),
        ),
        Criterion(
            "int8, default top-k: |reference / f32 - 1|",
            0.02,
            max((abs(m.reference / f32[m.top_k] - 1) for m in int8 if m.reference is not None), default=None),
        ),
        Criterion(
            "int8, default top-k: |perplexity / f32 - 1|",
            0.06,
            max((abs(m.perplexity / f32[m.top_k] - 1) for m in int8), default=None),
        ),
    ]


def report(measured: list[Measured], dense_perplexity: float, checks: list[Criterion]) -> str:
    """The human-readable table."""
    lines = [f"{NAME}, {texts.EVALUATION_TOKENS} tokens", ""]
    lines.append(
        f"{'package':<28} {'experts':>8} {'top-k':>7} {'perplexity':>11} {'reference':>10} {'max |diff| / range':>19}"
    )
    lines.append(f"{'dense (numpy, float64)':<28} {'':>8} {'':>7} {dense_perplexity:>11.3f}")
    for m in measured:
        top_k = f"{m.top_k} of {m.experts}"
        name, reference = Path(m.package).name, "" if m.reference is None else f"{m.reference:.3f}"
        lines.append(f"{name:<28} {m.scheme:>8} {top_k:>7} {m.perplexity:>11.3f} {reference:>10} {m.difference:>19.2e}")
    lines.append("")
    for check in checks:
        verdict = {True: "ok", False: "FAILED", None: "not checked"}[check.passed]
        had = "" if check.had is None else f"{check.had:.2e}"
        lines.append(f"{check.name:<50} {had:>10} (limit {check.limit:.0e}) {verdict}")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("packages", metavar="PACKAGE", type=Path, nargs="*", help="packages of the derived model")
    parser.add_argument(
        "--work",
        metavar="DIR",
        type=Path,
        default=ROOT / ".demo",
        help="where missing packages are made (default: .demo in the checkout)",
    )
    parser.add_argument("--cache", metavar="DIR", type=Path, help="where the download is kept (default: WORK/cache)")
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")
    args = parser.parse_args()
    cache = args.cache or args.work / "cache"
    try:
        packages = args.packages or make(args.work, cache)
        model = llama_gguf.read(source.fetch(cache).gguf)
        ids = texts.evaluation(tokenizer.build(model.vocabulary))
        dense = dense_llama.logits(model, ids)
        dense_perplexity = perplexity_of(dense, ids)
        measured = [measure(path, ids, dense) for path in packages]
        checks = criteria(measured, dense_perplexity)
        if all(check.had is None for check in checks):
            raise UsageError(
                "these packages allow no check",
                next_step="Give an f32 one with top-k = E, or an f32 and an int8 one of the same top-k",
            )
    except EStreamError as error:
        print(f"check_demo_model: {error}", file=sys.stderr)
        return error.exit_status
    if args.json:
        print(
            json.dumps(
                {
                    "tokens": len(ids),
                    "dense_perplexity": dense_perplexity,
                    "packages": [asdict(m) for m in measured],
                    "criteria": [asdict(check) | {"passed": check.passed} for check in checks],
                }
            )
        )
    else:
        print(report(measured, dense_perplexity, checks))
    return 1 if any(check.passed is False for check in checks) else 0


if __name__ == "__main__":
    sys.exit(main())
