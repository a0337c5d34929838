"""Rows that the NPU computes for each useful one: the plan of tiles, the real expert part and the real flash machine.

    python -m scripts.rows_computed
    python -m scripts.rows_computed --experts 128 --top-k 8 --arena 256MiB --tokens 512,4096 --json

Uniform and Zipf (weight 1 / rank) routing, per layer and seed; graphs do nothing here, only rows are counted. Beside it
what static graphs would compute: every expert padded to the fullest one, and the tokens lost if each is built for 1.25
times its fair share.
"""

from __future__ import annotations

import argparse
import json
import math
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from estream.flash.machine import Machine
from estream.flash.states import Answer, Load, ReadyGroup
from estream.layers.htp.experts import HtpExperts
from estream.layers.htp.graphs import Rung
from estream.models.base import Choice
from estream.package.layout import PanelLayout, PoolLayout
from estream.routing import RouteTable
from estream.runtime.memory import HostMemory
from estream.runtime.mock import MockProgram, MockTarget
from estream.runtime.target import TensorInfo
from estream.units import format_bytes, parse_size
from qnn_graphs.htp.build import default_ladder

_HIDDEN = 32
_MATRICES = ("gate", "up", "down")
_SMALL = PanelLayout(_HIDDEN, _HIDDEN, "f16")  # what the graphs are told; the arena is divided by the real panels
NOTHING = HostMemory().allocate(_SMALL.panel_bytes, "any panel")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--experts", type=int, default=64)
    parser.add_argument("--top-k", type=int, default=8)
    parser.add_argument("--hidden", type=int, default=2048)
    parser.add_argument("--width", type=int, default=1024, help="of a panel")
    parser.add_argument("--panels", type=int, default=1, help="per expert")
    parser.add_argument("--schemes", default="int8,int4")
    parser.add_argument("--arena", default="256MiB")
    parser.add_argument("--group", default="1,2", help="panels per group")
    parser.add_argument("--tokens", default="128,256,512,1024,2048,4096")
    parser.add_argument("--layers", type=int, default=16)
    parser.add_argument("--json", action="store_true")
    args = parser.parse_args()
    rows = [
        measure(args, scheme, tokens, routing, group)
        for scheme in args.schemes.split(",")
        for routing in ("uniform", "zipf")
        for tokens in map(int, args.tokens.split(","))
        for group in map(int, args.group.split(","))
    ]
    if args.json:
        print(json.dumps({"configuration": vars(args), "rows": rows}, indent=1))
        return
    print(f"{args.experts} experts, top-{args.top_k}, arena of {args.arena}, {args.layers} layers each")
    names = list(rows[0])
    print("| " + " | ".join(names) + " |\n|" + " --- |" * len(names))
    for row in rows:
        cells = (f"{value:.3f}" if isinstance(value, float) else str(value) for value in row.values())
        print("| " + " | ".join(cells) + " |")


def measure(args: argparse.Namespace, scheme: str, tokens: int, routing: str, group: int) -> dict[str, Any]:
    """One line of the table: all layers of a prompt."""
    panel = PanelLayout(args.hidden, args.width, scheme)
    pool = PoolLayout(panel, args.panels, args.experts, tuple(range(args.layers)))
    banks = parse_size(args.arena) // (group * panel.panel_bytes)
    random = np.random.default_rng([tokens, args.experts])
    tables = [route(random, tokens, args.experts, args.top_k, routing) for _ in range(args.layers)]
    experts, runs = counting_experts(default_ladder(args.experts, args.top_k, scheme), pool, tokens)
    machine = Machine(pool, group=group, banks=banks, lanes=2)
    experts.begin(tokens)
    machine.begin()
    for layer, table in enumerate(tables):
        machine.routes(layer, table.needed_panels(args.panels))
        experts.start(layer, table)
        for ready in groups(machine, layer, experts.flush):
            experts.run_group(ready)
        experts.finish()
    machine.end()
    useful = sum(int(table.counts.sum()) for table in tables)
    fair = math.ceil(1.25 * tokens * args.top_k / args.experts)
    lost = sum(int(np.maximum(table.counts - fair, 0).sum()) for table in tables)
    return {
        "scheme": scheme,
        "routing": routing,
        "tokens": tokens,
        "G": group,
        "B": banks,
        "arena": format_bytes(banks * machine.bank_bytes),
        "rows_computed / rows_useful": experts.rows_computed / experts.rows_useful,
        "dispatches per layer": runs() / args.layers,
        "static: padded to the fullest": sum(args.experts * int(table.counts.max()) for table in tables) / useful,
        "static 1.25x: computed": args.layers * args.experts * fair / useful,
        "static 1.25x: lost": lost / useful,
    }


def route(random: np.random.Generator, tokens: int, experts: int, top_k: int, routing: str) -> RouteTable:
    """top_k distinct experts per token, with equal weights or weights 1 / rank (ranks shuffled per layer)."""
    weights = np.ones(experts) if routing == "uniform" else 1 / random.permutation(np.arange(1, experts + 1))
    scores = np.log(weights) + random.gumbel(size=(tokens, experts))
    chosen = np.argsort(-scores, axis=1)[:, :top_k].astype(np.int32)
    return RouteTable.build(Choice(chosen, np.ones(chosen.shape, np.float32)), experts)


def groups(machine: Machine, layer: int, starved: Callable[[], None]) -> Iterator[ReadyGroup]:
    """A layer's groups as flash hands them out; every read is done at once, and no bank has any memory."""
    while (answer := machine.acquire(layer)) is not Answer.DONE:
        if isinstance(answer, Load):
            panels = tuple((panel, NOTHING) for panel in answer.needed or ())
            yield ReadyGroup(layer, answer.index, answer.bank, panels, partial(machine.release, answer))
        elif answer is Answer.STARVED:
            starved()
        else:
            while (read := machine.next_read()) is not None:
                machine.read_done(read)


def counting_experts(
    ladder: tuple[tuple[int, int], ...], pool: PoolLayout, tokens: int
) -> tuple[HtpExperts, Callable[[], int]]:
    """The expert part over graphs that do nothing, and how often they ran."""
    half, programs = np.dtype(np.float16), {}
    for slots, rows in ladder:
        inputs: dict[str, TensorInfo] = {}
        outputs: dict[str, TensorInfo] = {}
        for slot in range(slots):
            shapes = {"x": (rows, _HIDDEN), "gates": (rows, 1)} | dict.fromkeys(_MATRICES, (_HIDDEN, _HIDDEN))
            inputs |= {f"slot{slot}.{name}": TensorInfo(half, shape) for name, shape in shapes.items()}
            outputs[f"slot{slot}.y"] = TensorInfo(half, (rows, _HIDDEN))
        programs[f"expert.{slots}x{rows}"] = MockProgram(inputs, outputs)
    target = MockTarget(programs)
    rungs = [
        Rung(slots, rows, target.load(Path(f"expert.{slots}x{rows}.onnx")))
        for slots, rows in sorted(ladder, key=lambda rung: -rung[1])
    ]
    state: Any = SimpleNamespace(
        hidden=np.zeros((tokens, _HIDDEN), np.float32),
        normed=np.zeros((tokens, _HIDDEN), np.float16),
        nbytes=0,
        bytes_copied=0,
    )
    small = PoolLayout(_SMALL, pool.panels_per_expert, pool.experts, pool.moe_layers)
    return HtpExperts(target, rungs, small, state), target.runs.total


if __name__ == "__main__":
    main()
