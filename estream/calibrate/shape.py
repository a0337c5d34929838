"""Compute times of a package's shape on a target."""

from __future__ import annotations

import time
from collections.abc import Callable

import numpy as np

from estream.calibrate.timing import timed
from estream.flash.pool import PoolFile
from estream.flash.stream import ExpertStream
from estream.layers.signs import panel_preparation
from estream.models.rope import prompt_tables
from estream.opening import Opened
from estream.routing import RouteTable
from estream.runtime.memory import HostMemory
from estream.solver.profile import Points, Shape, shape_elements

ROWS = (2, 16, 32, 64, 128, 192, 256, 384, 512)
TOKENS = (16, 128, 512, 2048)
SECONDS = 0.25  # of each measurement, at least
_PANELS_BYTES = 96 << 20  # panels that a measurement goes through: more than any cache holds


class ShapeTimer:
    """Compute times of an opened package's shape, on random activations."""

    def __init__(self, opened: Opened, longest: int, step: Callable[[], None]) -> None:
        self._opened, self._longest, self._step = opened, longest, step
        self._random = np.random.default_rng(0)

    def measure(self) -> Shape:
        parts, package = self._opened.parts, self._opened.package
        state, hidden = parts.state, package.architecture.hidden
        state.hidden[: self._longest] = self._random.standard_normal((self._longest, hidden))
        parts.runner.begin(self._longest)
        dense = tuple((float(n), self._dense_s(n)) for n in sorted({min(n, self._longest) for n in TOKENS}))
        panel = self._panels()
        return Shape(panel, dense, self._head_s(), self._group_s(), *shape_elements(package))

    def _dense_s(self, tokens: int) -> float:
        parts, package = self._opened.parts, self._opened.package
        arch, attention = package.architecture, package.architecture.attention
        # With attention if there is such a layer: convolutions, of about as many weights, count as attention.
        plan = min((plan for plan in arch.layers if plan.ffn == "moe"), key=lambda plan: plan.mixer != "attention")
        bias = self._opened.weights.expert_bias(plan.index)
        tables = prompt_tables(attention.rope, attention.rotated, [tokens])

        def once() -> None:
            parts.attention.run(plan, [slice(0, tokens)], tables)
            choice = package.family.route(parts.state.logits[:tokens], bias)
            RouteTable.build(choice, arch.experts)
            # Layers add to the hidden state: it would grow from one repetition to the next.
            parts.state.hidden[:tokens] *= 0.5

        seconds = timed(once, SECONDS)
        self._step()
        return seconds

    def _panels(self) -> Points:
        opened, pool = self._opened, self._opened.package.pool
        runner, size = opened.parts.runner, pool.panel.panel_bytes
        count = max(1, min(pool.panels_per_layer, _PANELS_BYTES // size))
        buffer = opened.target.allocate(count * size, "panels to calibrate with")
        prepare = panel_preparation(opened.target, pool.panel)
        with PoolFile.open(opened.package.experts_file) as file:
            file.read_into(buffer.memory(), pool.panel_offset(pool.moe_layers[0], 0))
        panels = [buffer.part(at * size, size) for at in range(count)]
        for panel in panels:
            if prepare is not None:
                prepare(panel.memory())
        opened.parts.state.normed[: self._longest] = self._random.standard_normal(
            (self._longest, opened.package.architecture.hidden)
        )
        points = []
        turn = 0
        for rows in ROWS:
            if rows > min(runner.rows, self._longest):
                break
            gates = np.full(rows, 0.1, np.float32)

            def once(gates: np.ndarray = gates) -> None:
                nonlocal turn
                runner.run_record(0, "calibrate", panels[turn % count], gates)
                turn += 1

            points.append((float(rows), timed(once, SECONDS)))
            self._step()
        return tuple(points)

    def _head_s(self) -> float:
        head = self._opened.parts.head
        head.normalise(self._longest - 1, self._longest)
        seconds = timed(lambda: head.run([(slice(self._longest - 1, self._longest), lambda *_: None)]), SECONDS)
        self._step()
        return seconds / self._opened.package.head_slices

    def _group_s(self) -> float:
        """Groups of one panel that are read in no time: what the machine, its locks and threads cost."""
        pool = self._opened.package.pool
        memory = HostMemory()
        try:
            banks = [memory.allocate(pool.panel.panel_bytes, f"bank {number}") for number in range(2)]
            stream = ExpertStream(_Nothing(), pool, banks, group=1, lanes=2)
            try:
                started, groups = time.perf_counter(), 0
                stream.begin()
                for layer in pool.moe_layers:
                    stream.routes(layer, np.ones(pool.panels_per_layer, bool))
                    for ready in stream.groups(layer):
                        ready.release()
                        groups += 1
                    if time.perf_counter() - started > SECONDS:
                        break
                seconds = time.perf_counter() - started
                stream.abort()
            finally:
                stream.close()
        finally:
            memory.close()
        self._step()
        return seconds / max(groups, 1)


class _Nothing:
    """A source whose reads are done at once."""

    direct = True
    direct_reason: str | None = None

    def read_into(self, memory: memoryview, offset: int) -> None:
        pass

    def check_unchanged(self) -> None:
        pass
