"""Open a packed model and prefill prompts through the paged arena."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType

import numpy as np

from estream.errors import ClosedError, MemoryBudgetError, UsageError
from estream.flash.stream import ExpertStream
from estream.flash.whole_layers import WholeLayers
from estream.layers.head import LogitsSink
from estream.layers.loop import LayerLoop
from estream.layers.observe import Observer
from estream.opening import Options, open_model
from estream.prompt import check_prompts
from estream.result import PrefillResult, into
from estream.runtime.target import Target
from estream.solver.automatic import prefetch_for
from estream.strategies import DEFAULT
from estream.telemetry.stats import PrefillStats, Stopwatch
from estream.telemetry.trace import Trace


class Engine:
    """A packed model, opened for prefill on one target. Use it as a context manager.

    path: a `NAME.estream` directory. backend: "cpu", "htp" (or a Target). soc: htp only: whose contexts are run; None:
    sm8650. memory: budget of the whole process in bytes or as
    "2GiB"; None: no promise. group, banks, lanes: G, B, Q; None: automatic. prefetch: "before-routing",
    "after-routing", "on-demand", or "auto": by each prompt's length. resident: "none" or "all" experts kept in memory;
    None: as the strategy says. strategy: a name for options (`estream.strategies`), which others may not contradict.
    npumoe: options of strategy npumoe, by name: calibration (a file of `estream calibrate-experts`), tiers,
    capacity_quantile, unlimited, group_experts, cold_below; None leaves one to its default.
    pinned: the first groups of every layer's experts that stay in memory once they were read; None: as many as `memory`
    has room for. dense: attention and head
    weights "resident" in memory or "paged" layer by layer; "auto": paged where `memory` has no room for all of them.
    reference: the dequantise-then-f32 lowering. max_tokens: longest prompt; None: 4096, or the model's context where
    that is shorter.
    libraries: the folder of ONNX Runtime's and QNN's libraries, as on a phone; None: those of the installed packages.
    trace: a Trace that collects spans. progress: called with (stage, done, total): in bytes while
    opening, and in layers, stage "prefill", in every prefill.

    Calls of prefill from several threads are served one after the other. Raises EStreamError subclasses only (and
    KeyboardInterrupt); after an error in prefill the engine can be used again.
    """

    def __init__(
        self,
        path: str | Path,
        backend: str | Target = "cpu",
        memory: int | str | None = None,
        *,
        group: int | None = None,
        banks: int | None = None,
        lanes: int | None = None,
        prefetch: str = "auto",
        resident: str | None = None,
        dense: str = "auto",
        pinned: int | None = None,
        reference: bool = False,
        threads: int | None = None,
        direct_io: bool = True,
        verify_reads: bool = False,
        max_tokens: int | None = None,
        soc: str | None = None,
        libraries: str | Path | None = None,
        strategy: str = DEFAULT,
        npumoe: Mapping[str, object] | None = None,
        trace: Trace | None = None,
        progress: Callable[[str, int, int], None] | None = None,
    ) -> None:
        started = time.perf_counter()
        self._lock = threading.RLock()  # reentrant, so that a sink or a signal handler that calls back cannot hang
        self._busy = False
        self._closing = threading.Event()
        self._cleanup = ExitStack()
        options = Options(
            backend=backend,
            memory=memory,
            group=group,
            banks=banks,
            lanes=lanes,
            prefetch=prefetch,
            resident=resident,
            dense=dense,
            pinned=pinned,
            reference=reference,
            threads=threads,
            direct_io=direct_io,
            verify_reads=verify_reads,
            max_tokens=max_tokens,
            soc=soc,
            libraries=libraries,
            strategy=strategy,
            npumoe=npumoe,
            trace=trace,
            progress=progress,
        )
        try:
            self._opened = open_model(path, options, self._cleanup)
        except MemoryError as error:
            self._cleanup.close()
            raise _out_of_memory("opening the model") from error
        except BaseException:
            self._cleanup.close()
            raise
        opened = self._opened
        self.package, self.max_tokens = opened.package, opened.max_tokens
        self._weights, self._experts, self._parts = opened.weights, opened.experts, opened.parts
        self._loop = LayerLoop(opened.package, opened.weights, opened.parts, self._check_closing, progress)
        self._trace = trace
        self.load_s = time.perf_counter() - started

    @property
    def experts(self) -> ExpertStream | WholeLayers:
        """The expert pool as the layer loop sees it; for benchmarks that read without computing."""
        return self._experts

    @property
    def configuration(self) -> dict[str, object]:
        """Everything resolved, as results and reports carry it."""
        return self._opened.description

    def prefetch_for(self, tokens: int) -> str:
        """The prefetch mode of a pass of so many tokens: what "auto" becomes."""
        arch = self.package.architecture
        return prefetch_for(self._opened.configuration.prefetch, arch.experts, arch.top_k, tokens)

    def prefill(
        self,
        ids: Sequence[int] | np.ndarray,
        logits: str | None = "last",
        hidden: bool = False,
        logits_sink: LogitsSink | None = None,
        observe: Observer | None = None,
    ) -> PrefillResult:
        """Runs the prompt `ids` (at least one token) through the model.

        logits: "last" → float32 [V], "all" → float32 [N, V], None → none. logits_sink: with "all", receives
        (row, column, block) pieces instead of an array being built. hidden: also return the final-normed hidden states.
        observe: called after each graph with its outputs, which it may replace (`estream.layers.observe`).
        Raises PromptError, FlashError, NumericError, TargetError, ClosedError.
        """
        if logits_sink is not None and logits != "all":
            raise UsageError("logits_sink needs logits='all'", asked=repr(logits))
        return self._serve([ids], logits, hidden, logits_sink, observe)[0]

    def prefill_batch(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        logits: str | None = "last",
        hidden: bool = False,
        observe: Observer | None = None,
    ) -> list[PrefillResult]:
        """Runs several prompts, of any lengths, in one pass: attention apart, each expert record read once for all.

        At most max_tokens tokens together. Results in the order of the prompts; their statistics are those of the pass.
        Otherwise as `prefill`.
        """
        return self._serve(prompts, logits, hidden, None, observe)

    def _serve(
        self,
        prompts: Sequence[Sequence[int] | np.ndarray],
        logits: str | None,
        hidden: bool,
        sink: LogitsSink | None,
        observe: Observer | None,
    ) -> list[PrefillResult]:
        if logits not in ("last", "all", None):
            raise UsageError("logits must be 'last', 'all' or None", asked=repr(logits))
        started = time.perf_counter()
        ids = check_prompts(prompts, self.package.architecture, self.max_tokens)
        with self._lock:
            if self._busy:
                raise UsageError("a prefill was called from within a prefill", next_step="Return from the sink first")
            if self._closing.is_set():
                raise ClosedError("the engine is closed", next_step="Open a new Engine")
            self._busy = True
            try:
                return self._prefill(ids, logits, hidden, sink, observe, started)
            except MemoryError as error:
                self._abort()
                raise _out_of_memory(f"a prefill of {sum(map(len, ids))} tokens") from error
            except BaseException:
                self._abort()
                raise
            finally:
                self._busy = False
                if self._closing.is_set():
                    self._cleanup.close()

    def _prefill(
        self,
        prompts: list[np.ndarray],
        logits: str | None,
        hidden: bool,
        sink: LogitsSink | None,
        observe: Observer | None,
        started: float,
    ) -> list[PrefillResult]:
        state, ids = self._parts.state, np.concatenate(prompts)
        tokens, stops = len(ids), np.cumsum([len(prompt) for prompt in prompts]).tolist()
        rows = [slice(stop - len(prompt), stop) for prompt, stop in zip(prompts, stops, strict=True)]
        watch = Stopwatch(self._trace)
        state.bytes_copied = 0
        self._copied_before = self._copied_so_far()
        self._parts.runner.begin(tokens)
        self._weights.begin(head=logits is not None)
        prefetch = self.prefetch_for(tokens)
        self._experts.begin(prefetch)
        with watch("embed_s", "embedding"):
            state.hidden[:tokens] = self._opened.embedding.rows(ids)
        self._loop.run(rows, self._experts, watch, observe)
        with watch("head_s", "output head"):
            answers = self._answers(rows, logits, hidden, sink, observe)
        # After the head, which hides the last reads of groups that turned out not to be needed.
        self._experts.end()
        self._weights.end()
        ttft = time.perf_counter() - started
        stats, configuration = self._stats(watch, ttft, ids), {**self.configuration, "prefetch": prefetch}
        return [
            PrefillResult(
                tokens=piece.stop - piece.start,
                logits=answer[0] if answer is not None and logits == "last" else answer,
                hidden=state.normed[piece].astype(np.float32) if hidden else None,
                stats=stats,
                configuration=configuration,
            )
            for piece, answer in zip(rows, answers, strict=True)
        ]

    def _answers(
        self,
        prompts: list[slice],
        logits: str | None,
        hidden: bool,
        sink: LogitsSink | None,
        observe: Observer | None,
    ) -> list[np.ndarray | None]:
        """Final norm of the prompts' rows, and the logits of each, float32 [R, V], unless a sink takes them."""
        arch, head = self.package.architecture, self._parts.head
        answers: list[np.ndarray | None] = [None] * len(prompts)
        for rows in prompts if logits or hidden else ():
            first = rows.start if logits == "all" or hidden else rows.stop - 1
            head.normalise(first, rows.stop)
            if observe:
                arrays = {"normed": self._parts.state.normed[first : rows.stop]}
                observe(len(arch.layers), "final_norm", slice(first, rows.stop), arrays)
        if logits:
            wanted = [slice(rows.start if logits == "all" else rows.stop - 1, rows.stop) for rows in prompts]
            if sink is None:
                made = [np.empty((rows.stop - rows.start, arch.vocab), np.float32) for rows in wanted]
                answers = [*made]
                head.run([(rows, into(answer)) for rows, answer in zip(wanted, made, strict=True)])
            else:
                head.run([(rows, sink) for rows in wanted])
        return answers

    def _abort(self) -> None:
        try:
            self._experts.abort()
        finally:  # an interrupt here must not leave the lane of dense weights at work
            self._weights.abort()

    def _check_closing(self) -> None:
        if self._closing.is_set():
            raise ClosedError("the engine was closed during the prefill", next_step="Open a new Engine")

    def _stats(self, watch: Stopwatch, ttft: float, ids: np.ndarray) -> PrefillStats:
        counters, panels = self._experts.counters, self.package.pool.panels_per_expert
        arena = self._opened.configuration.arena_bytes
        resident = self._weights.nbytes + self._experts.kept_bytes
        (staged_before, of_npu_before), (staged, of_npu) = self._copied_before, self._copied_so_far()
        row_bytes = self.package.dense["embed"].nbytes // self.package.architecture.vocab
        return PrefillStats.measured(
            watch,
            ttft_s=ttft,
            load_s=self.load_s,
            flash_wait_s=counters.wait_s + self._weights.wait_s,
            bytes_read=counters.bytes_read,
            dense_bytes_read=len(np.unique(ids)) * row_bytes + self._weights.bytes_read,
            records_read=-(-counters.panels_read // panels),
            records_needed=-(-counters.panels_needed // panels),
            groups_skipped=counters.groups_skipped,
            flash_busy_s=counters.busy_s,
            rows_computed=self._parts.runner.rows_computed,
            rows_useful=self._parts.runner.rows_useful,
            dropped_rate=self._loop.dropped / self._loop.routed if self._loop.routed else 0.0,
            bytes_copied=self._parts.state.bytes_copied + staged - staged_before,
            npu_bytes_copied=None if of_npu is None else of_npu - (of_npu_before or 0),
            direct_io=self._opened.file.direct,
            direct_io_reason=self._opened.file.direct_reason,
            arena_bytes=arena,
            resident_weight_bytes=resident,
            shared_bytes=getattr(self._opened.target, "shared_bytes", None),
        )

    def _copied_so_far(self) -> tuple[int, int | None]:
        """Bytes that went through a buffer to be read, and that the NPU's driver copied, since the engine opened."""
        staged = self._opened.file.staged_bytes + self._weights.staged_bytes
        return staged, getattr(self._opened.target, "npu_bytes_copied", None)

    def close(self) -> None:
        """Releases everything. A prefill in another thread ends with ClosedError first; one that this thread is in the
        middle of (a sink, a signal handler) closes when it ends. Twice is harmless."""
        self._closing.set()
        with self._lock:
            if not self._busy:
                self._cleanup.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _out_of_memory(what: str) -> MemoryBudgetError:
    return MemoryBudgetError(f"the system has no memory left for {what}", next_step="Give a smaller --memory or prompt")
