"""How often each graph runs in a prefill: what its traffic and time are sums over."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence

from estream.layers.htp.ladder import Ladder, plan_layer
from estream.layers.htp.masks import first_block
from estream.models.base import Architecture


def dense_calls(
    arch: Architecture, tokens: int, *, rows: int, steps: int, groups: int, slices: int, near: Sequence[int]
) -> Counter[str]:
    """Calls of norm, qkv, attention, conv, o and head for one prompt whose last token's logits are asked for.

    rows: of a block. steps: key blocks per attention call. groups: of query heads. slices: of the head. near: tokens of
    each MoE layer that are computed again exactly (`Family.undecided`).
    """
    blocks, layers = -(-tokens // rows), len(arch.layers)
    attention = sum(
        groups * -(-(block + 1 - first_block(plan.window, block, rows)) // steps)
        for plan in arch.layers
        if plan.mixer == "attention"
        for block in range(blocks)
    )
    refined = sum(-(-count // rows) for count in near)
    each, conv = blocks * layers, blocks * sum(plan.mixer == "conv" for plan in arch.layers)
    counts = Counter(norm=2 * each + refined + 1, qkv=each - conv, attention=attention, conv=conv, o=each, head=slices)
    return +counts  # without what is never called


def expert_calls(
    arch: Architecture, tokens: int, counts: Mapping[int, Sequence[int]], *, width: int, ladder: Ladder
) -> Counter[str]:
    """Calls of the expert graphs, `expert.SxT`: routed, shared and dense FFNs, with all groups of a layer in the arena.

    counts: rows of each expert, by MoE layer. width: of a panel. ladder: (slots, rows), largest rows first.
    """

    def panels(channels: int) -> int:
        return -(-channels // width)

    calls: Counter[str] = Counter()
    for plan in arch.layers:
        if plan.ffn == "dense":
            work: list[tuple[Sequence[int], int]] = [([tokens], panels(arch.dense_intermediate))]
        else:
            work = [(counts[plan.index], panels(arch.expert_intermediate))]
            if arch.shared_intermediate:
                work.append(([tokens], panels(arch.shared_intermediate)))
        for rows, per_expert in work:
            for dispatch in plan_layer(rows, per_expert, ladder):
                calls["expert.{}x{}".format(*ladder[dispatch.rung])] += 1
    return calls
