"""The NPU's cost model, simulated prefills, strategies, and how far published times are met."""

from __future__ import annotations

import time
from dataclasses import replace
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from estream.errors import MemoryBudgetError, UsageError
from estream.flash.states import Load
from estream.package.outline import outline
from estream.package.presets import PRESETS
from estream.solver.holding import Holding, Planned
from estream.solver.latency import predict
from estream.solver.load import draw_counts
from estream.solver.npu import NpuCosts, panel_weights
from estream.solver.phone import Phone, load_phone, phones
from estream.solver.search import Plan
from estream.solver.simulate import SIMULATED, simulate_prefill
from scripts import fit_phone, simulate_regret

LADDER = ((1, 256), (2, 128), (8, 32))
MODEL = "olmoe-1b-7b"


def golden() -> Phone:
    """Round figures: one second is so many operations or bytes of each kind."""
    return Phone(
        machine={"device": "golden"},
        matrix_flops=1e12,
        latent_flops=1e11,
        vector_bytes_per_s=1e10,
        ddr_bytes_per_s=1e10,
        dispatch_s=1e-4,
        row_reads_bytes_per_s=1e9,
        flash_bytes_per_s=1e9,
        flash_by_size={1 << 20: 1.0},
        flash_by_lanes={1: 1.0},
        compute_slowdown=1.0,
        flash_slowdown=1.0,
        base_bytes=1 << 20,
    )


def simulated(phone: Phone, tokens: int = 512, preset: str = MODEL, **options: Any) -> Plan:
    package = outline(preset)
    arch = package.architecture
    counts = draw_counts(arch.experts, arch.top_k, tokens, len(package.pool.moe_layers))
    return simulate_prefill(package, phone, tokens, counts, fit_phone.ladder_of(preset), **options)


def test_dispatches_are_priced_by_products_or_traffic() -> None:
    """Two experts of OLMoE's shape, 256 and 32 rows: one dispatch of a large tile, one of eight small slots."""
    package, phone = outline(MODEL, experts="f16"), golden()
    hidden, panel, weights = 2048, package.pool.panel.panel_bytes, 3 * 2048 * 1024
    assert panel_weights(package) == weights
    counts = np.zeros(64, np.int64)
    counts[3], counts[5] = 256, 32
    work = NpuCosts(phone, LADDER).workload(package, 256, [counts] * 16)
    large = 1e-4 + max(2 * 256 * weights / 1e12, (panel + 4 * 256 * hidden) / 1e10)
    small = 1e-4 + max(2 * 256 * weights / 1e12, 8 * (panel + 4 * 32 * hidden) / 1e10)
    assert small > large
    first, second = work.dispatches[0]
    assert (first.panels, second.panels) == ((3,), (5,))
    assert first.seconds == pytest.approx(large) and second.seconds == pytest.approx(small)
    assert np.flatnonzero(work.panel_s[0]).tolist() == [3, 5]
    assert work.panel_s[0][3] == pytest.approx(256 * hidden * 14 / 1e10)
    assert work.panel_s[0][5] == pytest.approx(32 * hidden * 14 / 1e10)
    assert work.fixed_s == pytest.approx(2 * 16 * 1e-4)


def test_dispatches_wait_for_their_tiles_and_hold_their_groups() -> None:
    """Panels 0 and 1 share a dispatch, 1 and 2 another; panel 3 has its own."""
    planned = (Planned(10.0, (0, 1)), Planned(20.0, (1, 2)), Planned(5.0, (3,)))
    loads = [Load(0, index, index, 0, (index,), (index,)) for index in range(4)]
    whole = Holding({0: planned}, lambda load: 1.0, 1.0)
    assert [whole.take(load) for load in loads] == [
        (1.0, []),
        (11.0, [loads[0]]),
        (21.0, [loads[1], loads[2]]),
        (6.0, [loads[3]]),
    ]
    starved = Holding({0: planned}, lambda load: 1.0, 2.0)
    assert starved.take(loads[0]) == (1.0, []) and starved.flush() == (20.0, [loads[0]])
    assert starved.take(loads[1]) == (21.0, []) and starved.take(loads[2]) == (41.0, [loads[1], loads[2]])


def test_few_banks_cost_dispatches_with_empty_slots() -> None:
    """40 rows of every expert: tiles of 32 and 8, eight slots a dispatch, but two banks hold two experts."""
    package, costs = outline(MODEL), NpuCosts(golden(), LADDER)
    work = costs.workload(package, 320, [np.full(64, 40)] * 16)
    profile = replace(golden(), flash_bytes_per_s=1e14).profile
    few, many = (
        predict(package, profile, costs, work, group=1, banks=banks, lanes=1, prefetch="before-routing")
        for banks in (2, 64)
    )
    assert many.ttft_s == pytest.approx(work.compute_s, rel=0.01) and few.ttft_s > 1.5 * many.ttft_s


def test_integers_are_unpacked_once() -> None:
    """512 rows are two tiles; what int4 adds to float16 is one pass over the panel, read as stored and written."""
    phone, counts = golden(), [np.full(64, 512)] * 16
    costs = NpuCosts(phone, LADDER)
    seconds = {}
    for scheme in ("f16", "int4"):
        package = outline(MODEL, experts=scheme)
        seconds[scheme] = costs.workload(package, 512, counts).panel_s[0][0]
    panel, weights = outline(MODEL).pool.panel.panel_bytes, 3 * 2048 * 1024
    assert seconds["int4"] - seconds["f16"] == pytest.approx((panel + 2 * weights) / 1e10)


def test_dense_work_counts_projections_attention_norms_and_calls() -> None:
    package = outline(MODEL, experts="f16")
    work = NpuCosts(golden(), LADDER).workload(package, 100, [np.zeros(64, np.int64)] * 16)
    projections = 2 * 100 * 4 * 2048**2 / 1e12
    attention = 2 * 16 * 256 * (100 * 101 / 2) / 1e12
    rows = 100 * 2048 * 22 / 1e10
    router = 2 * 100 * 2048 * 64 / 1e12
    assert work.dense_s[1] == pytest.approx(projections + attention + rows + router + 5e-4)
    assert work.dense_s[0] == pytest.approx(work.dense_s[1] + 100 * 2 * 2048 / 1e9)  # and the embedding's rows
    assert work.tail_s == pytest.approx(2 * 2048 * package.head_slices * package.head_width / 1e10 + 7e-4)


def test_latent_attention_windows_and_convolutions_have_their_own_costs() -> None:
    def core(phone: Phone, preset: str, tokens: int) -> float:
        package = outline(preset, experts="int8")
        arch = package.architecture
        nothing = [np.zeros(arch.experts, np.int64)] * len(arch.moe_layers)
        return NpuCosts(phone, LADDER).workload(package, tokens, nothing).compute_s

    slow = replace(golden(), latent_flops=0.5e11)
    pairs = 1000 * 1001 / 2
    assert core(slow, "deepseek-v2-lite", 1000) - core(golden(), "deepseek-v2-lite", 1000) == pytest.approx(
        27 * 2 * 16 * (576 + 512) * pairs / 1e11
    )
    assert core(slow, MODEL, 1000) == core(golden(), MODEL, 1000)

    def curvature(preset: str) -> float:
        return core(golden(), preset, 6144) - 2 * core(golden(), preset, 4096) + core(golden(), preset, 2048)

    # Half of gpt-oss's layers see 128 keys, three quarters of LFM2's are convolutions: neither grows with the square.
    assert curvature("gpt-oss-20b") == pytest.approx(12 * 2 * 64 * 128 * 2048**2 / 1e12)
    assert curvature("lfm2.5-8b-a1b") == pytest.approx(6 * 2 * 32 * 128 * 2048**2 / 1e12)


def test_a_simulated_prefill_is_bound_by_what_is_slow() -> None:
    slow_flash = simulated(replace(golden(), matrix_flops=1e16, vector_bytes_per_s=1e13, ddr_bytes_per_s=1e13))
    pool = outline(MODEL).pool.pool_bytes
    assert slow_flash.bound == "flash" and slow_flash.prediction.flash_s == pytest.approx(pool / 1e9)
    assert slow_flash.prediction.ttft_s == pytest.approx(pool / 1e9, rel=0.05)
    resident = simulated(golden(), strategy="resident")
    assert resident.prediction.wait_s == 0 and resident.prediction.bytes_read == 0
    assert resident.prediction.ttft_s == pytest.approx(resident.prediction.compute_s)
    assert resident.peak_bytes > pool and resident.configuration.resident == "all"


RATES = ("matrix_flops", "vector_bytes_per_s", "ddr_bytes_per_s", "flash_bytes_per_s", "row_reads_bytes_per_s")


@settings(max_examples=12, deadline=None, derandomize=True)
@given(name=st.sampled_from(RATES), times=st.floats(1.05, 8), tokens=st.sampled_from((64, 300, 1500)))
def test_a_faster_phone_is_never_slower(name: str, times: float, tokens: int) -> None:
    phone = load_phone("oneplus15")
    before = simulated(phone, tokens).prediction.ttft_s
    after = simulated(replace(phone, **{name: times * getattr(phone, name)}), tokens).prediction.ttft_s
    assert after <= before * 1.006  # equal plans, to the solver, are 0.5 % apart


def test_longer_prompts_take_longer_and_more_memory_does_not() -> None:
    phone = load_phone("oneplus15")
    times = [simulated(phone, tokens).prediction.ttft_s for tokens in (128, 512, 2048, 4096)]
    assert times == sorted(times)
    budgets = [simulated(phone, 1024, memory=size << 20).prediction.ttft_s for size in (600, 800, 1200)]
    assert all(later <= sooner * 1.006 for sooner, later in pairwise(budgets))


def test_unknown_phones_and_strategies_are_refused() -> None:
    with pytest.raises(UsageError, match=r"unknown device .asked 'nokia', had oneplus12, oneplus15"):
        load_phone("nokia")
    with pytest.raises(UsageError, match="unknown strategy"):
        simulated(golden(), strategy="magic")


@pytest.mark.parametrize(
    ("strategy", "prefetch"), [("on-demand", "before-routing"), ("resident", "on-demand"), ("padded", "on-demand")]
)
def test_a_strategy_excludes_what_it_stands_against(strategy: str, prefetch: str) -> None:
    with pytest.raises(UsageError, match=f"--strategy {strategy} and --prefetch {prefetch} exclude each other"):
        simulated(golden(), strategy=strategy, prefetch=prefetch)


def test_strategies_read_and_compute_what_they_stand_for() -> None:
    phone = load_phone("oneplus15")
    plans = {name: simulated(phone, 512, memory=1 << 30, strategy=name) for name in SIMULATED if name != "resident"}
    layer = outline(MODEL).pool.panels_per_layer
    sizes = {name: (plan.configuration.group, plan.configuration.banks) for name, plan in plans.items()}
    assert sizes["on-demand"][0] == 1 and sizes["layer-streaming"] == (layer, 2)
    assert plans["on-demand"].configuration.prefetch == "on-demand"
    assert plans["padded"].prediction.compute_s > 1.5 * plans["estream"].prediction.compute_s
    assert all(plan.peak_bytes <= 1 << 30 for plan in plans.values())
    with pytest.raises(MemoryBudgetError, match="2 bank"):
        simulated(phone, 512, memory=600 << 20, strategy="layer-streaming")


@pytest.mark.parametrize("preset", ["olmoe-1b-7b", "qwen3-30b-a3b"])
def test_estream_beats_the_exact_strategies_in_the_same_memory(preset: str) -> None:
    phone, memory = load_phone("oneplus15"), {"olmoe-1b-7b": 1 << 30, "qwen3-30b-a3b": 2 << 30}[preset]
    for tokens in (256, 1024):
        own = simulated(phone, tokens, preset, memory=memory).prediction.ttft_s
        for name in ("on-demand", "padded", "layer-streaming"):
            assert own <= simulated(phone, tokens, preset, memory=memory, strategy=name).prediction.ttft_s, name


def test_published_times_that_were_held_out_are_met() -> None:
    """docs/simulation.md holds the table."""
    phone = load_phone(fit_phone.DEVICE)
    for figure in fit_phone.FIGURES:
        error = fit_phone.simulated(phone, figure) / figure.seconds - 1
        assert abs(error) <= 0.15, figure.name
        if figure.fitted:
            assert abs(error) <= 0.03, figure.name


def test_the_command_with_its_defaults_meets_them_too() -> None:
    """With this project's own int4 records and no budget."""
    phone = load_phone(fit_phone.DEVICE)
    for figure in fit_phone.FIGURES:
        seconds = simulated(phone, figure.tokens, figure.preset).prediction.ttft_s
        assert abs(seconds / figure.seconds - 1) <= 0.11, figure.name


def test_bubbles_of_the_prefetch_modes_have_the_published_order_and_rough_size() -> None:
    found = fit_phone.bubbles(load_phone(fit_phone.DEVICE))
    assert found["on-demand"] > found["after-routing"] > found["before-routing"]
    for mode, rate in found.items():
        assert 0.5 < rate / fit_phone.BUBBLES[mode] < 2, mode


@pytest.mark.parametrize("preset", sorted(PRESETS))
@pytest.mark.parametrize("device", phones())
def test_every_preset_runs_on_every_phone(preset: str, device: str) -> None:
    package = outline(preset)
    arch = package.architecture
    counts = draw_counts(arch.experts, arch.top_k, 300, len(arch.moe_layers))
    begun = time.process_time()
    plan = simulate_prefill(package, load_phone(device), 300, counts, LADDER)
    assert time.process_time() - begun < 1
    assert 0.01 < plan.prediction.ttft_s < 100 and 0 <= plan.prediction.bubble_rate < 1


def test_the_choice_is_near_the_best_of_every_configuration() -> None:
    """docs/simulation.md holds all twelve pairs; this budget leaves room for a few banks."""
    found = simulate_regret.measure(load_phone("oneplus15"), MODEL, "700MiB", 1024, skew=1.0)
    assert found["configurations"] > 80 and 0 <= found["regret"] <= simulate_regret.MOST


def test_estream_in_less_memory_than_a_layer_reads_smaller_groups() -> None:
    """The smallest budgets page the dense weights, too, and are kept."""
    phone = load_phone("oneplus15")
    with pytest.raises(MemoryBudgetError, match=r"smallest budget that works is --memory \d+") as refused:
        simulated(phone, 512, memory=200 << 20)
    least = int(str(refused.value).split("--memory ")[1].split()[0])
    plan = simulated(phone, 512, memory=least)
    assert plan.peak_bytes <= least and plan.configuration.dense_weights == "paged" and plan.configuration.group == 1
