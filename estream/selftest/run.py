"""Runs the reference and the target under test over the same prompt and compares them graph by graph."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from estream.engine import Engine
from estream.errors import NumericError
from estream.layers.observe import Observer, Rows
from estream.package.reader import Package
from estream.runtime.target import Target
from estream.selftest.compare import Comparer
from estream.selftest.prompts import Outline, difference, two_prompts
from estream.selftest.record import Key, Recorder
from estream.selftest.report import SelftestReport
from estream.selftest.tolerances import Tolerances

TOKENS = 64


def selftest(
    path: str | Path,
    backend: str | Target = "cpu",
    *,
    tokens: int = TOKENS,
    threads: int | None = None,
    stage: Callable[[str], None] | None = None,
    soc: str | None = None,
) -> SelftestReport:
    """Compares `backend` with the package's reference lowering, layer by layer, each with the reference's input.

    Where the package holds no reference graphs, only what needs none is checked: outputs are finite, not zero, and two
    prompts give two answers. tokens: length of the prompts. soc: as of Engine. stage: told what begins.

    Raises EStreamError: the package cannot be opened or is damaged, the prompt is longer than the context, the target
    fails. An output that is not finite is a finding.
    """
    say = stage or (lambda what: None)
    package = Package.open(path)
    layers = len(package.architecture.layers)
    prompts = two_prompts(package.architecture.vocab, tokens)
    reference: tuple[Recorder, np.ndarray] | None = None
    if has_reference(package):
        say("reference lowering")
        reference = _reference(path, prompts[0], threads)
    with Engine(path, backend, threads=threads, max_tokens=tokens, soc=soc) as engine:
        manifest, configuration = package.manifest, engine.configuration
        name, graphs = str(configuration["backend"]), str(configuration["graphs"])
        outlines, logits, stopped = (Outline(), Outline()), [], None
        comparer = None
        observers: list[Observer] = [outlines[0]]  # sees outputs before the reference's take their place
        if reference is not None:
            comparer = Comparer(reference[0], Tolerances(graphs, manifest.experts, manifest.dense))
            observers.append(comparer)
        try:
            for prompt, observe, label in zip(
                prompts, (_all(observers), outlines[1]), ("first", "second"), strict=True
            ):
                say(f"{name}, {label} prompt")
                logits.append(_logits(engine, prompt, observe))
                if comparer is not None and reference is not None and label == "first":
                    comparer.head(layers, logits[0], reference[1], package.head_width)
                    comparer.finish()
        except NumericError as error:
            stopped = str(error)
    zero = list(dict.fromkeys(outlines[0].zeros() + outlines[1].zeros()))
    return SelftestReport(
        package=Path(path),
        backend=name,
        graphs=graphs,
        simulated=bool(configuration.get("simulated", False)),
        tokens=tokens,
        reference=reference is not None,
        panels_per_expert=package.pool.panels_per_expert,
        differences=comparer.differences if comparer is not None else (),
        prompts_differ_by=difference(*logits) if len(logits) == 2 else None,
        zero=[_name(key, layers) for key in zero],
        same=[_name(key, layers) for key in outlines[0].same(outlines[1]) if key not in zero],
        stopped=stopped,
    )


def has_reference(package: Package) -> bool:
    """Whether the package holds the reference's graphs; a copy made for a phone may leave them out."""
    return any(name.startswith("graphs/reference/") for name in package.manifest.files)


def _reference(path: str | Path, prompt: np.ndarray, threads: int | None) -> tuple[Recorder, np.ndarray]:
    """The reference's run: one bank, one lane, every byte verified, so that nothing can go stale in it."""
    recorder = Recorder()
    with Engine(
        path,
        "cpu",
        group=1,
        banks=1,
        lanes=1,
        prefetch="on-demand",
        reference=True,
        threads=threads,
        verify_reads=True,
        max_tokens=len(prompt),
    ) as engine:
        return recorder, _logits(engine, prompt, recorder)


def _logits(engine: Engine, prompt: np.ndarray, observe: Observer) -> np.ndarray:
    logits = engine.prefill(prompt, logits="all", observe=observe).logits
    assert logits is not None, "logits were asked for"
    return logits


def _all(observers: list[Observer]) -> Observer:
    def observe(layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None) -> None:
        for observer in observers:
            observer(layer, graph, rows, arrays, panel)

    return observe


def _name(key: Key, layers: int) -> str:
    layer = f"layer {key.layer}, " if key.layer < layers else ""
    return f"{layer}{key.graph}: {key.name}"
