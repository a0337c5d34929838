"""What computing costs on a phone's NPU: the dispatches of the htp ladder, and a layer's dense work, by rates.

A dispatch takes its fixed cost and the longer of its matrix products and its DDR traffic (the compiler's figures are
within 2 % of the least there can be, docs/htp.md: that is what is counted). Beside it stands what passes through vector
registers: every matrix unpacked to 16 bits once per prefill, rows gathered for an expert and its results added back.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from estream.layers.htp.ladder import Ladder, plan_layer
from estream.layers.weights import dense_bytes
from estream.models.base import Architecture
from estream.package.chunks import CONV_LINEARS
from estream.package.dense import linears
from estream.package.layout import INTEGER_SCHEMES
from estream.package.reader import Package
from estream.solver.automatic import held_bytes
from estream.solver.costs import Workload
from estream.solver.holding import Planned
from estream.solver.phone import Phone

_HALF, _SINGLE = 2, 4  # bytes
_GATHERED = (
    2 * _HALF + _HALF + 2 * _SINGLE
)  # per element of a row: x read and written; y read, the sum read and written
_NORMED = 2 * (_SINGLE + _HALF) + _HALF + 2 * _SINGLE  # two norms, and a residual added, per element of a token
_LAYER_CALLS = 5  # norm, qkv, attention, o, norm with router


@dataclass(frozen=True)
class NpuCosts:
    """ladder: (slots, rows) of the expert graphs, largest rows first."""

    phone: Phone
    ladder: Ladder

    group_s: float = 0.0  # its dispatches are all that a group costs

    def workload(self, package: Package, tokens: int, counts: Sequence[np.ndarray]) -> Workload:
        """Dispatches run when their last tile has come (holding.py); unpacking, gathering and adding are a panel's."""
        arch, phone = package.architecture, self.phone
        mixers = {plan: self._mixer(package, plan, tokens) for plan in {(one.mixer, one.window) for one in arch.layers}}
        router = 2 * tokens * arch.hidden * arch.router_width / phone.matrix_flops
        shared = self._record_s(package, tokens, package.shared_panels)
        ffn = self._record_s(package, tokens, package.ffn_panels)
        waiting = tokens * _HALF * arch.hidden / phone.row_reads_bytes_per_s
        dense = []
        for plan in arch.layers:
            waiting += mixers[plan.mixer, plan.window]
            if plan.ffn == "dense":
                waiting += ffn
            else:
                dense.append(waiting + router + shared)
                waiting = 0.0
        found = []
        seen: dict[bytes, tuple[np.ndarray, tuple[Planned, ...]]] = {}  # drawn loads repeat
        for layer in counts:
            key = np.asarray(layer, np.int64).tobytes()
            if key not in seen:
                seen[key] = self._experts(package, [int(rows) for rows in layer], package.pool.panels_per_expert)
            found.append(seen[key])
        return Workload(
            tokens,
            tuple(dense),
            tuple(seconds for seconds, _ in found),
            waiting + self._head_s(package),
            sum(len(planned) for _, planned in found) * phone.dispatch_s,
            tuple(planned for _, planned in found),
        )

    def held(self, package: Package, base_bytes: int, tokens: int) -> int:
        """Activations as target htp holds them: float32 and float16 rows, K and V of one layer, the rings of tiles."""
        arch, attention = package.architecture, package.architecture.attention
        row = (_SINGLE + _HALF) * arch.hidden + _SINGLE * max(arch.router_width, 1)
        row += _HALF * attention.kv_heads * (attention.head_dim + attention.v_dim)
        rings = sum(2 * _HALF * slots * rows * arch.hidden for slots, rows in self.ladder)
        vectors, _, _ = dense_bytes(package)
        return held_bytes(base_bytes + vectors, tokens * row + rings, 0, arch, tokens)

    def _experts(
        self, package: Package, counts: Sequence[int], per_expert: int
    ) -> tuple[np.ndarray, tuple[Planned, ...]]:
        """Seconds of each panel beside dispatches, float64 [experts · per_expert], and the dispatches."""
        arch, phone = package.architecture, self.phone
        rows = np.repeat(np.asarray(counts, np.float64), per_expert)
        # An expert's rows are gathered once and its results added once, whatever the number of its panels.
        seconds = rows / per_expert * arch.hidden * _GATHERED / phone.vector_bytes_per_s
        seconds[rows > 0] += self._unpack_s(package, package.pool.panel.scheme, panel_weights(package))
        each = [self._dispatch_s(package, slots, size) for slots, size in self.ladder]
        planned = plan_layer(counts, per_expert, self.ladder)
        return seconds, tuple(Planned(each[one.rung], tuple(panel for panel, _ in one.tiles)) for one in planned)

    def _dispatch_s(self, package: Package, slots: int, rows: int) -> float:
        """One call: empty slots compute and read, too."""
        hidden, phone = package.architecture.hidden, self.phone
        products = 2 * slots * rows * panel_weights(package)
        traffic = slots * (package.pool.panel.panel_bytes + 2 * _HALF * rows * hidden)
        return phone.dispatch_s + max(products / phone.matrix_flops, traffic / phone.ddr_bytes_per_s)

    def _record_s(self, package: Package, tokens: int, panels: int) -> float:
        """Every token through a shared expert or a dense FFN."""
        if not panels:
            return 0.0
        seconds, planned = self._experts(package, [tokens], panels)
        return float(seconds.sum()) + sum(one.seconds for one in planned)

    def _unpack_s(self, package: Package, scheme: str, weights: float) -> float:
        """Integers are read and written as float16; a panel's bytes are as stored, a dense matrix's one per weight."""
        if scheme not in INTEGER_SCHEMES:
            return 0.0
        stored = package.pool.panel.panel_bytes / panel_weights(package) if scheme == package.pool.panel.scheme else 1.0
        return weights * (stored + _HALF) / self.phone.vector_bytes_per_s

    def _mixer(self, package: Package, plan: tuple[str, int | None], tokens: int) -> float:
        """Attention or convolution of one layer, its norms and the residual."""
        arch, phone = package.architecture, self.phone
        mixer, window = plan
        weights = sum(rows * columns for rows, columns in linears(arch.attention, arch.hidden).values())
        if mixer == "conv":
            weights = (len(CONV_LINEARS) + 1) * arch.hidden**2
        seconds = 2 * tokens * weights / phone.matrix_flops + self._unpack_s(package, package.manifest.dense, weights)
        if mixer == "attention":
            seconds += self._core_s(arch, tokens, window)
        return seconds + tokens * arch.hidden * _NORMED / phone.vector_bytes_per_s + _LAYER_CALLS * phone.dispatch_s

    def _core_s(self, arch: Architecture, tokens: int, window: int | None) -> float:
        """Scores and sums of the keys that each query sees. Latent attention is computed in its latent space: keys are
        the latent vector and what turns, values the latent vector, for every head."""
        a, reach = arch.attention, min(window or tokens, tokens)
        pairs = tokens * reach - reach * (reach - 1) / 2
        if a.latent is None:
            return 2 * a.heads * (a.head_dim + a.v_dim) * pairs / self.phone.matrix_flops
        return 2 * a.heads * (2 * a.latent.rank + a.rotated) * pairs / self.phone.latent_flops

    def _head_s(self, package: Package) -> float:
        """Logits of one token: the weights' way through DDR, or unpacking them."""
        weights = package.architecture.hidden * package.head_width * package.head_slices
        unpack = self._unpack_s(package, package.manifest.dense, weights)
        read = weights * (1 if package.manifest.dense == "int8" else _HALF) / self.phone.ddr_bytes_per_s
        return max(unpack, read) + package.head_slices * self.phone.dispatch_s


def panel_weights(package: Package) -> int:
    """Weights of a panel's three matrices."""
    return 3 * package.architecture.hidden * package.pool.panel.width
