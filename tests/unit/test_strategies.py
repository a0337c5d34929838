"""Strategies by name: the options that they stand for, contradictions, refusals, and the routes of padded experts."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from estream.cli.main import main
from estream.errors import MemoryBudgetError, UsageError
from estream.flash.machine import Machine
from estream.flash.virtual import simulate
from estream.layers.htp.ladder import Dispatch
from estream.models.base import Choice
from estream.opening import Options
from estream.package.layout import PanelLayout, PoolLayout
from estream.package.reader import Package
from estream.routing import RouteTable
from estream.runtime.mock import MockTarget
from estream.strategies import DEFAULT, STRATEGIES, find_strategy, parse_strategies
from estream.strategies.padded import PaddedExperts, PaddedHtpExperts

POOL = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0, 2))
SMALL = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0,))
PANEL = POOL.panel.panel_bytes
NAMES = ("estream", "resident", "on-demand", "layer-streaming", "cpu-only", "padded", "per-expert-graph")


def settled(name: str, pool: PoolLayout = POOL, **options: Any) -> Options:
    return Options(strategy=name, **options).settled(find_strategy(name), pool)


def resolved(options: Options, memory: int | None = None, held: int = 0, pool: PoolLayout = POOL) -> Any:
    return options.resolve(cast(Package, SimpleNamespace(pool=pool)), memory, held)


def test_names() -> None:
    assert DEFAULT == "estream" and set(NAMES) <= set(STRATEGIES)
    assert all(name == strategy.name and strategy.summary for name, strategy in STRATEGIES.items())
    assert all(STRATEGIES[name].exact for name in NAMES)
    assert [strategy.name for strategy in parse_strategies("on-demand, estream")] == ["on-demand", "estream"]
    with pytest.raises(UsageError, match=r"unknown strategy \(asked layer-steaming, .*Did you mean layer-streaming"):
        find_strategy("layer-steaming")
    with pytest.raises(UsageError, match="twice"):
        parse_strategies("estream,estream")
    for text in ("", ",", "estream,"):
        with pytest.raises(UsageError, match="a strategy's name is empty"):
            parse_strategies(text)


def test_what_the_names_stand_for() -> None:
    assert settled("estream", group=3, prefetch="on-demand") == Options(group=3, prefetch="on-demand")
    one = settled("on-demand")
    assert (one.group, one.banks, one.prefetch, one.resident, one.pinned) == (2, None, "on-demand", "none", 0)
    whole = settled("layer-streaming")
    assert (whole.group, whole.banks, whole.prefetch, whole.pinned) == (8, 2, "before-routing", 0)
    assert settled("resident").resident == settled("per-expert-graph", SMALL).resident == "all"
    assert settled("cpu-only").backend == "cpu" and settled("padded").prefetch == "before-routing"
    # To say what the name says already is no contradiction.
    assert settled("layer-streaming", group=8, banks=2, pinned=0, prefetch="before-routing") == whole
    target = MockTarget()
    assert settled("on-demand", backend=target).backend is target


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("on-demand", {"prefetch": "before-routing"}, "--strategy on-demand and --prefetch before-routing exclude"),
        ("on-demand", {"group": 1}, "--strategy on-demand and --group 1 .*group is 2, one expert"),
        ("layer-streaming", {"group": 4}, "--strategy layer-streaming and --group 4 .*group is 8, a whole layer"),
        ("layer-streaming", {"banks": 3}, "--strategy layer-streaming and --banks 3 .*banks is 2"),
        ("layer-streaming", {"pinned": 1}, "--strategy layer-streaming and --pinned 1 .*pinned is 0"),
        ("resident", {"resident": "none"}, "--strategy resident and --resident none .*resident is all"),
        ("resident", {"banks": 2}, "--strategy resident and --banks 2 .*resident has no banks"),
        ("cpu-only", {"backend": "htp"}, "--strategy cpu-only and --backend htp .*backend is cpu"),
        ("cpu-only", {"backend": MockTarget()}, "--strategy cpu-only and --backend mock"),
        ("padded", {"prefetch": "after-routing"}, "--strategy padded and --prefetch after-routing"),
        ("per-expert-graph", {"prefetch": "on-demand"}, "--strategy per-expert-graph and --prefetch on-demand"),
    ],
)
def test_contradictions_name_both(name: str, options: dict[str, Any], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        settled(name, SMALL, **options)


def test_contexts_beyond_the_limit_are_counted() -> None:
    layers = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0, 1))
    assert settled("per-expert-graph", layers).resident == "all"  # 8
    wide = PoolLayout(PanelLayout(2048, 1024, "int8"), 1, 64, tuple(range(16)))
    with pytest.raises(UsageError, match=r"asked 1024 contexts, had a limit of 8"):
        settled("per-expert-graph", wide)
    with pytest.raises(UsageError, match=r"asked 9 contexts"):
        settled("per-expert-graph", PoolLayout(PanelLayout(32, 32, "f32"), 1, 9, (0,)))


def test_budgets_of_fixed_sizes() -> None:
    two_layers, held = 16 * PANEL, 500
    chosen = resolved(settled("layer-streaming"), held + two_layers, held)
    assert (chosen.group, chosen.banks, chosen.arena_bytes, chosen.pinned) == (8, 2, two_layers, 0)
    with pytest.raises(MemoryBudgetError, match=rf"--strategy layer-streaming is --memory {held + two_layers}$"):
        resolved(settled("layer-streaming"), held + two_layers - 1, held)
    with pytest.raises(MemoryBudgetError, match=rf"--strategy layer-streaming is --memory {held + 8 * PANEL}$"):
        resolved(settled("layer-streaming", SMALL), held, held, SMALL)  # of one layer
    assert resolved(settled("on-demand"), held + 2 * PANEL, held).banks == 1
    with pytest.raises(MemoryBudgetError, match=rf"--strategy on-demand is --memory {held + 2 * PANEL}$"):
        resolved(settled("on-demand"), held + 2 * PANEL - 1, held)
    with pytest.raises(MemoryBudgetError, match=rf"--strategy resident is --memory {held + POOL.pool_bytes}$"):
        resolved(settled("resident"), held, held)
    # The same budget for each, and none takes more.
    for name in ("estream", "on-demand", "layer-streaming", "padded"):
        chosen = resolved(settled(name), held + two_layers, held)
        assert chosen.arena_bytes + chosen.pinned_bytes <= two_layers


# Of a phone (UFS 4.x, two lanes): bytes of a stripe, bytes per second.
STRIPES = np.array([128 << 10, 256 << 10, 512 << 10, 1 << 20, 2 << 20, 4 << 20, 8 << 20])
RATES = np.array([954e6, 1536e6, 1882e6, 2085e6, 2044e6, 2172e6, 2529e6])
SHAPES = {
    "olmoe": PoolLayout(PanelLayout(2048, 1024, "int4"), 1, 64, tuple(range(16))),
    "olmoe int8": PoolLayout(PanelLayout(2048, 1024, "int8"), 1, 64, tuple(range(16))),
    "lfm2.5": PoolLayout(PanelLayout(2048, 1792, "int4"), 1, 32, tuple(range(22))),
}


@pytest.mark.parametrize("shape", SHAPES)
def test_estream_is_not_slower_than_layers_in_an_arena_of_two_of_them(shape: str) -> None:
    pool = SHAPES[shape]
    needed = dict.fromkeys(pool.moe_layers, np.ones(pool.panels_per_layer, bool))

    def seconds(name: str, compute_s: float) -> float:
        chosen = resolved(settled(name, pool), 2 * pool.layer_bytes, pool=pool)
        mode = "before-routing" if chosen.prefetch == "auto" else chosen.prefetch
        machine = Machine(pool, group=chosen.group, banks=chosen.banks, lanes=chosen.lanes, mode=mode)
        return simulate(
            machine,
            needed,
            lambda nbytes: chosen.lanes * nbytes / float(np.interp(np.log(nbytes), np.log(STRIPES), RATES)),
            lambda load: 0.65 * compute_s * len(load.needed or ()) / pool.panels_per_layer + 3e-5,
            lambda layer: 0.35 * compute_s,
        ).total_s

    for share in (0.3, 0.7, 1.0, 1.5, 3.0):  # a layer's compute to its reading
        compute_s = share * pool.layer_bytes / RATES[-1]
        own, layers = seconds("estream", compute_s), seconds("layer-streaming", compute_s)
        assert own <= 1.002 * layers, share  # 30 us for each group are all that layers can gain
        assert share != 1.0 or own < 0.99 * layers
        assert own < 0.9 * seconds("on-demand", compute_s), share


TABLE = RouteTable.build(Choice(np.array([[0, 2], [2, 0], [2, 3]], np.int32), np.ones((3, 2), np.float32)), 4)


def test_padded_experts_have_tiles_for_the_whole_prompt() -> None:
    runner = cast(Any, object.__new__(PaddedExperts))
    runner._panels_per_expert, runner._capacity = 2, [2, 1]
    found = [[(tile.rows.tolist(), least) for tile, least in runner.tiles(TABLE, expert)] for expert in range(4)]
    assert found == [[([0, 1], 2), ([], 1)], [([], 2), ([], 1)], [([0, 1], 2), ([2], 1)], [([2], 2), ([], 1)]]
    assert runner.needed(TABLE).tolist() == [True] * 8
    assert runner.admit(0, TABLE) is TABLE


def test_padded_dispatches_on_htp() -> None:
    runner = cast(Any, object.__new__(PaddedHtpExperts))
    runner._panels_per_expert, runner._ladder, runner._tokens = 1, [(3, 2), (6, 1)], 3
    tiles = [
        (expert, slice(*piece))
        for expert, piece in (
            (0, (0, 2)),
            (0, (2, 2)),
            (1, (0, 0)),
            (1, (0, 0)),
            (2, (0, 2)),
            (2, (2, 3)),
            (3, (0, 1)),
            (3, (1, 1)),
        )
    ]
    assert runner.dispatches(TABLE) == [Dispatch(0, tiles[:3]), Dispatch(0, tiles[3:6]), Dispatch(0, tiles[6:])]
    assert runner.needed(TABLE).all()


def test_bench_checks_its_arguments(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (
        (["--tokens", "8", "--strategy", "estream,never"], "unknown strategy"),
        (["--tokens", "8,8"], "a length stands twice"),
        (["--tokens", "0"], "must be at least 1"),
        ([], "--tokens"),
    ):
        with pytest.raises(SystemExit) as ended:
            main(["bench", "x.estream", *arguments])
        assert ended.value.code == 2 and said in capsys.readouterr().err


def test_prefill_knows_the_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["prefill", "x.estream", "--ids", "1", "--strategy", "layer-steaming"])
    assert ended.value.code == 2 and "layer-streaming" in capsys.readouterr().err
