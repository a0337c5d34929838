"""The automatic configuration: defaults, clipping, budgets, and what is refused."""

from __future__ import annotations

import pytest

from estream.errors import MemoryBudgetError, UsageError
from estream.package.layout import PanelLayout, PoolLayout
from estream.solver.automatic import resolve

OLMOE = PoolLayout(PanelLayout(2048, 1024, "int8"), 1, 64, tuple(range(16)))
TINY = PoolLayout(PanelLayout(32, 32, "f32"), 2, 4, (0, 2))
PANEL = OLMOE.panel.panel_bytes


def test_olmoe_gets_three_panels_per_group_and_a_quarter_gibibyte() -> None:
    chosen = resolve(OLMOE)
    assert PANEL == 6307840
    assert (chosen.group, chosen.banks, chosen.lanes) == (3, 14, 2)
    assert chosen.arena_bytes == 14 * 3 * PANEL <= 256 << 20
    assert 2 * PANEL < 16 << 20 <= chosen.bank_bytes == 3 * PANEL


def test_tiny_pool_is_not_given_more_banks_than_groups() -> None:
    chosen = resolve(TINY)
    assert (chosen.group, chosen.banks) == (8, 2)
    assert resolve(TINY, group=3, banks=99).banks == 6
    assert resolve(TINY, group=64).group == 8


def test_budget_shrinks_the_arena_down_to_one_panel() -> None:
    assert resolve(OLMOE, memory=1 << 30, held=(1 << 30) - 100_000_000).arena_bytes <= 100_000_000
    least = resolve(OLMOE, memory=1 << 30, held=(1 << 30) - PANEL)
    assert (least.group, least.banks) == (1, 1)


def test_too_small_a_budget_is_refused_with_the_smallest_that_works() -> None:
    with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + PANEL}$"):
        resolve(OLMOE, memory=500 + PANEL - 1, held=500)
    assert resolve(OLMOE, memory=500 + PANEL, held=500).arena_bytes == PANEL
    with pytest.raises(MemoryBudgetError, match="cannot hold all experts"):
        resolve(OLMOE, memory=1 << 30, resident="all")


def test_resident_needs_no_arena() -> None:
    assert resolve(OLMOE, resident="all").arena_bytes == 0


def test_dense_weights_are_paged_where_the_budget_has_no_room_for_them() -> None:
    sizes = (40 * PANEL, 3 * PANEL)
    assert resolve(OLMOE, dense_bytes=sizes).dense_weights == "resident"
    assert resolve(OLMOE, dense="paged", dense_bytes=sizes).dense_bytes == 3 * PANEL
    for memory, mode, banks in ((41 * PANEL, "resident", 1), (41 * PANEL - 1, "paged", 12), (4 * PANEL, "paged", 1)):
        chosen = resolve(OLMOE, memory=500 + memory, held=500, dense_bytes=sizes)
        assert (chosen.dense_weights, chosen.banks) == (mode, banks)
        assert chosen.arena_bytes + chosen.dense_bytes <= memory
    for dense, others in (("auto", ""), ("paged", ""), ("resident", " with --dense paged")):
        with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + 4 * PANEL}{others}$"):
            resolve(OLMOE, memory=500 + 4 * PANEL - 1, held=500, dense=dense, dense_bytes=sizes)
    with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + 4 * PANEL} with"):
        resolve(OLMOE, memory=500 + 40 * PANEL, held=500, dense="resident", dense_bytes=sizes)
    # Of a model so small that two slots are no less than everything
    with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + 3 * PANEL}$"):
        resolve(OLMOE, memory=600, held=500, dense_bytes=(2 * PANEL, 2 * PANEL))


def test_all_experts_beside_paged_dense_weights() -> None:
    need = OLMOE.pool_bytes
    chosen = resolve(OLMOE, memory=need + 3, held=0, resident="all", dense_bytes=(10, 3))
    assert (chosen.dense_weights, chosen.arena_bytes) == ("paged", 0)
    with pytest.raises(MemoryBudgetError, match=f"Use --resident none, or --memory {need + 3}$"):
        resolve(OLMOE, memory=need + 2, held=0, resident="all", dense_bytes=(10, 3))


def test_pinned_groups_count_against_the_budget() -> None:
    chosen = resolve(OLMOE, pinned=2)
    assert (chosen.group, chosen.pinned, chosen.pinned_bytes) == (3, 2, 16 * 6 * PANEL)
    assert chosen.arena_bytes == 14 * 3 * PANEL  # without a budget they come on top
    chosen = resolve(OLMOE, group=3, pinned=99)
    assert (chosen.pinned, chosen.pinned_bytes, chosen.banks) == (22, OLMOE.pool_bytes, 1)
    for room in (16 * PANEL + PANEL, 20 * PANEL, 40 * PANEL, 200 * PANEL):
        chosen = resolve(OLMOE, pinned=1, memory=500 + room, held=500)
        assert chosen.pinned_bytes == 16 * chosen.group * PANEL
        assert chosen.pinned_bytes + chosen.arena_bytes <= room
    with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + PANEL} with --pinned 0$"):
        resolve(OLMOE, pinned=1, memory=500 + 17 * PANEL - 1, held=500)
    with pytest.raises(MemoryBudgetError, match=rf"--memory {500 + PANEL} with --group 1 --banks 1 --pinned 0$"):
        resolve(OLMOE, group=3, banks=2, pinned=1, memory=600, held=500)


def test_what_a_budget_has_beside_the_arena_is_pinned() -> None:
    assert resolve(OLMOE).pinned == 0 and resolve(OLMOE, memory=256 << 20).pinned == 0
    more = [resolve(OLMOE, memory=gibibytes << 30) for gibibytes in (1, 2, 4, 8)]
    assert [chosen.pinned for chosen in more] == [2, 6, 13, 22]
    assert [chosen.arena_bytes for chosen in more[:3]] == [resolve(OLMOE).arena_bytes] * 3
    assert (more[3].pinned_bytes, more[3].banks) == (OLMOE.pool_bytes, 1)
    for gibibytes, chosen in zip((1, 2, 4), more, strict=False):
        spare = (gibibytes << 30) - chosen.arena_bytes - chosen.pinned_bytes
        assert 32 << 20 <= spare < (32 << 20) + 17 * 3 * PANEL
    assert resolve(OLMOE, memory=8 << 30, resident="all").pinned == 0


@pytest.mark.parametrize(
    "options",
    [
        {"group": 0},
        {"banks": 0},
        {"lanes": 0},
        {"lanes": 65},
        {"prefetch": "never"},
        {"resident": "some"},
        {"dense": "some"},
        {"pinned": -1},
        {"pinned": True},
    ],
)
def test_values_that_cannot_be_meant(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        resolve(OLMOE, **options)  # type: ignore[arg-type]
