"""Opens the parts of an engine, in the order in which they depend on each other."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import Any

from estream.errors import MemoryBudgetError, UsageError
from estream.flash.groups import Homes
from estream.flash.pool import PoolFile
from estream.flash.resident import ResidentExperts
from estream.flash.stream import ExpertStream
from estream.flash.whole_layers import WholeLayers
from estream.layers.htp.find import find_contexts
from estream.layers.htp.graphs import HtpGraphs
from estream.layers.signs import panel_preparation
from estream.layers.targets import ExpertPart, Parts, RunnerOpening, open_parts, open_runner
from estream.layers.weights import DenseWeights
from estream.package.embedding import Embedding
from estream.package.layout import PoolLayout
from estream.package.reader import Package
from estream.prompt import longest_prompt
from estream.runtime import open_target
from estream.runtime.pieces import join
from estream.runtime.target import Target
from estream.solver.automatic import LANES, Configuration, budget_bytes, held_bytes, resolve
from estream.solver.tuned import tuned
from estream.strategies import DEFAULT, RunnerFactory, Strategy, find_strategy
from estream.telemetry.memory import process_memory
from estream.telemetry.trace import Trace

Progress = Callable[[str, int, int], None]  # (stage, done, total)


@dataclass(frozen=True)
class Options:
    """What an engine was asked for: see `Engine`."""

    backend: str | Target = "cpu"
    memory: int | str | None = None
    group: int | None = None
    banks: int | None = None
    lanes: int | None = None
    prefetch: str = "auto"
    resident: str | None = None  # "none", unless the strategy says otherwise
    dense: str = "auto"
    pinned: int | None = None
    reference: bool = False
    threads: int | None = None
    direct_io: bool = True
    verify_reads: bool = False
    max_tokens: int | None = None
    soc: str | None = None
    libraries: str | Path | None = None
    trace: Trace | None = None
    progress: Progress | None = None
    strategy: str = DEFAULT
    npumoe: Mapping[str, object] | None = None  # see `estream.strategies.npumoe_options`

    def settled(self, strategy: Strategy, pool: PoolLayout) -> Options:
        """With what the strategy stands for. Raises UsageError: an option says otherwise, or the package is not for
        the strategy."""
        given: dict[str, Any] = {}
        for option in fields(self):
            value = getattr(self, option.name)
            if value != option.default:
                given[option.name] = value if option.name != "backend" or isinstance(value, str) else value.name
        values: dict[str, Any] = strategy.resolve(given, pool)
        if strategy.check is not None:
            strategy.check(pool)
        return replace(self, **{name: value for name, value in values.items() if name not in given})

    def left_open(self, strategy: Strategy) -> bool:
        """Lanes are ours to choose, and so are group and banks where the strategy does not stand for them."""
        own = "group" in strategy.options or self.group is self.banks is None
        return own and self.lanes is None and self.resident != "all"

    def resolve(
        self, package: Package, memory: int | None = None, held: int = 0, dense_bytes: tuple[int, int] = (0, 0)
    ) -> Configuration:
        """As `solver.automatic.resolve`, which says what it raises."""
        fixed = self.strategy if find_strategy(self.strategy).own_budget else None
        return resolve(
            package.pool,
            group=self.group,
            banks=self.banks,
            lanes=self.lanes,
            prefetch=self.prefetch,
            resident="none" if self.resident is None else self.resident,
            dense=self.dense,
            pinned=self.pinned,
            strategy=fixed,
            memory=memory,
            held=held,
            dense_bytes=dense_bytes,
        )


@dataclass(frozen=True)
class Opened:
    """An engine's parts, ready for a prefill. memory: the budget in bytes. tuned: group and lanes are the solver's."""

    package: Package
    strategy: Strategy
    max_tokens: int
    memory: int | None
    target: Target
    weights: DenseWeights
    parts: Parts
    configuration: Configuration
    tuned: bool
    embedding: Embedding
    file: PoolFile
    experts: ExpertStream | WholeLayers

    @property
    def description(self) -> dict[str, object]:
        """Everything resolved, as results and reports carry it."""
        return {
            "strategy": self.strategy.name,
            "backend": self.target.name,
            "graphs": self.target.graphs,
            "threads": getattr(self.target, "threads", None),
            **self.configuration.to_dict(),
            "tuned": self.tuned,
            "memory": self.memory,
            "max_tokens": self.max_tokens,
            "tile_rows": self.parts.runner.rows,
            "block_rows": self.parts.state.block,
            "panel_width": self.package.pool.panel.width,
            "experts": self.package.pool.panel.scheme,
            "dense": self.package.manifest.dense,
            "verify_reads": self.experts.verifies,
            "direct_io": self.file.direct,
            **self.parts.configuration,
            **({"shared_mappings": self.target.shared_mappings} if hasattr(self.target, "shared_mappings") else {}),
            **self.parts.runner.configuration,
        }


def open_model(path: str | Path, options: Options, cleanup: ExitStack) -> Opened:
    """Opens a package and all that a prefill needs. What must be released is left with `cleanup`, also after an error.

    Raises EStreamError; mistakes in the options are told before anything is loaded.
    """
    package = Package.open(path)
    arch = package.architecture
    max_tokens = longest_prompt(options.max_tokens, arch.context)
    budget = budget_bytes(options.memory)
    strategy = find_strategy(options.strategy)
    options = options.settled(strategy, package.pool)
    options.resolve(package)
    target = options.backend
    if options.soc is not None and target == "cpu":
        raise UsageError("--soc is of target htp", asked=options.soc, next_step="Give --backend htp, or leave it out")
    if isinstance(target, str):
        target = open_target(
            target,
            threads=options.threads,
            reference=options.reference,
            libraries=options.libraries,
            soc=options.soc,
        )
    cleanup.callback(target.close)
    # Before anything is allocated: memory that an NPU sees comes from a loaded graph's session.
    graphs = None
    if target.graphs == "htp":
        graphs = HtpGraphs(target, find_contexts(package, options.soc, options.libraries))
    verify = options.verify_reads
    weights = DenseWeights(target, package, direct=options.direct_io, lanes=options.lanes or LANES, verify=verify)
    cleanup.callback(weights.close)
    factory = strategy.runner
    runner = open_runner if factory is None else partial(_open_own, factory, options)
    parts = open_parts(target, package, weights, max_tokens, graphs, cleanup, runner)
    shared: int | None = getattr(target, "shared_bytes", None)
    now = process_memory().held_bytes(shared or 0) or 0
    reserved = parts.state.nbytes if shared is None else 0  # shared memory is taken when it is allocated
    held = held_bytes(now, reserved, parts.state.scratch_bytes, arch, max_tokens)
    if strategy.weights_in_graphs:
        held -= package.pool.pool_bytes  # the graphs' weights are in memory by now: not once more
    sizes = (weights.resident_bytes, weights.paged_bytes)
    configuration, by_profile = _configure(options, strategy, package, target, max_tokens, budget, held, sizes)
    weights.settle(configuration.dense_weights == "paged", options.trace)
    parts.attention.settle()
    parts.head.settle()
    embedding = package.open_embedding()
    cleanup.callback(embedding.close)
    file = PoolFile.open(package.experts_file, direct=options.direct_io)
    cleanup.callback(file.close)
    if verify:
        _ = package.checksums  # read now, by name; afterwards the package may be replaced
        embedding.check(next(crc for name, _, _, crc in package.dense_pieces() if name == "embed"))
    if strategy.weights_in_graphs:
        kept = package.pool.pool_bytes
        experts: ExpertStream | WholeLayers = WholeLayers(package.pool, kept_bytes=kept, verifies=verify)
    else:
        experts = _open_experts(package, target, file, configuration, options)
    cleanup.callback(experts.close)
    # Everything is open or in memory: nothing is read by name from here on.
    package.check_unchanged()
    chosen = configuration, by_profile
    return Opened(package, strategy, max_tokens, budget, target, weights, parts, *chosen, embedding, file, experts)


def _open_own(factory: RunnerFactory, options: Options, opening: RunnerOpening) -> ExpertPart:
    return factory(opening, options)


def _configure(
    options: Options,
    strategy: Strategy,
    package: Package,
    target: Target,
    tokens: int,
    memory: int | None,
    held: int,
    dense_bytes: tuple[int, int],
) -> tuple[Configuration, bool]:
    """The configuration, and whether group and lanes are those that the solver chose for this measured machine."""
    configuration = options.resolve(package, memory, held, dense_bytes)
    choice = tuned(package, target, tokens, memory) if options.left_open(strategy) else None
    if choice is not None:
        own = replace(options, group=options.group or choice.group, lanes=choice.lanes)
        # The budget is a promise: what the run time holds now may leave no room for the solver's group.
        with contextlib.suppress(MemoryBudgetError):
            better = own.resolve(package, memory, held, dense_bytes)
            if better.dense_weights == configuration.dense_weights:
                return better, True
    return configuration, False


def _open_experts(
    package: Package, target: Target, file: PoolFile, chosen: Configuration, options: Options
) -> ExpertStream | ResidentExperts:
    pool = package.pool
    prepare = panel_preparation(target, pool.panel)
    checksum = package.checksum if options.verify_reads else None
    if chosen.resident == "all":
        records = [pool.record_bytes] * (pool.experts * len(pool.moe_layers))
        buffers = join(target.allocate_pieces(records, "resident experts")) if records else []
        return ResidentExperts(
            file, pool, buffers, lanes=chosen.lanes, checksum=checksum, prepare=prepare, progress=options.progress
        )
    banks = target.allocate_pieces([chosen.bank_bytes] * chosen.banks, "arena")
    homes = []
    if chosen.pinned:
        sizes = Homes(pool, chosen.group, chosen.pinned, chosen.banks).sizes
        homes = target.allocate_pieces(sizes, "pinned experts")
    return ExpertStream(
        file,
        pool,
        banks,
        group=chosen.group,
        lanes=chosen.lanes,
        mode="before-routing" if chosen.prefetch == "auto" else chosen.prefetch,
        homes=homes,
        checksum=checksum,
        prepare=prepare,
        trace=options.trace,
    )
