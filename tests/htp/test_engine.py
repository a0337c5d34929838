"""The whole prefill in the simulator, package to logits."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream import Engine
from estream.errors import NumericError, TargetError, UsageError
from estream.layers.htp.calls import dense_calls, expert_calls
from estream.layers.htp.graphs import Rung
from estream.layers.htp.slots import Slots, Work, panel_inputs
from estream.layers.htp.state import nbytes
from estream.layers.observe import Rows
from estream.package.chunks import head_groups
from estream.package.layout import PanelLayout
from estream.quality import agreement, perplexity_of, split_windows
from estream.runtime import open_target
from estream.runtime.mock import MockGraph, MockTarget
from estream.runtime.target import Buffer
from estream.selftest import selftest
from tests.support.choices import Choices
from tests.support.families import found
from tests.support.htp_packages import SMALL, compiled
from tests.support.packages import packed
from tests.support.schemes import dense_matrix, rms_norm
from tests.support.tiny_checkpoints import TinyCheckpoint, prompt

LENGTHS = (1, 31, 32, 33, 130, 600)
Made = tuple[Path, TinyCheckpoint]


@pytest.fixture(scope="module", params=found())
def made(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Made:
    return compiled(tmp_path_factory.mktemp(request.param), request.param, **found()[request.param].htp)


@pytest.fixture(scope="module")
def olmoe(tmp_path_factory: pytest.TempPathFactory) -> Made:
    return compiled(tmp_path_factory.mktemp("plain"), "olmoe", experts="int8", hidden_size=64)


def test_logits_and_choices_are_those_of_transformers(made: Made) -> None:
    package, tiny = made
    agreed = chosen = 0
    with Engine(package, "htp", max_tokens=600) as engine:
        assert engine.configuration["simulated"] is True and engine.configuration["soc"] == "sm8650"
        arch = engine.package.architecture
        for length in LENGTHS:
            ids = prompt(length, seed=length)
            reference = tiny.router_logits(ids)
            biases = tiny.expert_biases()
            imposed = Choices(engine.package.family, reference, impose=True, biases=biases)
            result, expected = engine.prefill(ids, logits="all", observe=imposed), tiny.logits(ids)
            assert result.logits is not None
            error = float(np.linalg.norm(result.logits - expected) / np.linalg.norm(expected))
            own = Choices(engine.package.family, reference, impose=False, biases=biases)
            engine.prefill(ids, logits=None, observe=own)
            print(f"{arch.family}, {length} tokens: error {error:.5f}; {own.agreed} of {own.all} own choices agree")
            assert error <= 1e-2
            agreed, chosen = agreed + own.agreed, chosen + own.all
            stats = result.stats
            panels = 1 + bool(arch.shared_intermediate)
            assert stats.rows_useful is not None and stats.rows_computed is not None
            assert stats.rows_useful >= length * (arch.top_k + panels - 1)
            assert stats.rows_computed % 128 == 0 and stats.rows_computed > stats.rows_useful
    assert agreed >= 0.99 * chosen


def test_paged_dense_weights_and_pinned_experts_give_the_same_bytes(made: Made) -> None:
    package, _ = made
    with Engine(package, "htp", max_tokens=70) as engine:
        expected = [engine.prefill(prompt(length), logits="all").logits for length in (3, 40)]
    with Engine(package, "htp", max_tokens=70, dense="paged", pinned=2, group=1, banks=1) as engine:
        for length, logits in zip((3, 40), expected, strict=True):
            assert np.array_equal(engine.prefill(prompt(length), logits="all").logits, logits)
        assert engine.configuration["dense_weights"] == "paged"


def test_streamed_equals_resident_whatever_the_grouping(olmoe: Made) -> None:
    ids = prompt(97)
    with Engine(olmoe[0], "htp", resident="all", max_tokens=100) as engine:
        expected = engine.prefill(ids, logits="all").logits
        assert expected is not None
        last = engine.prefill(ids).logits
        assert last is not None and np.array_equal(last, expected[-1])
    for group, banks in ((1, 1), (1, 3), (1, 9), (3, 2), (2, 3), (8, 2)):
        with Engine(olmoe[0], "htp", group=group, banks=banks, max_tokens=100) as engine:
            result = engine.prefill(ids, logits="all")
            assert np.array_equal(result.logits, expected), (group, banks)


def test_bound_addresses_are_fixed(olmoe: Made) -> None:
    def pairs(lengths: list[int]) -> int:
        target = MockTarget(inner=open_target("htp", threads=1))
        with Engine(olmoe[0], target, max_tokens=100, group=8, banks=1) as engine:
            for length in lengths:
                engine.prefill(prompt(length), logits="all")
        return len(target.bound)

    # 8 experts of the one bank in every slot, all blocks and masks: a long prompt meets all of them.
    assert pairs([100, 100]) == pairs([100, 1, 33, 100, 64, 99])


def test_an_address_has_one_size_in_each_graph(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    """The QNN provider keeps a memory handle per graph and address, made for the first tensor that was bound there."""
    sizes: dict[tuple[str, int], set[int]] = {}
    bind = MockGraph.bind

    def spy(graph: MockGraph, name: str, buffer: Buffer, rows: int | None = None) -> None:
        info = graph.inputs.get(name) or graph.outputs[name]
        sizes.setdefault((graph.name, buffer.address), set()).add(nbytes(info))
        bind(graph, name, buffer, rows)

    monkeypatch.setattr(MockGraph, "bind", spy)
    for options in ({"dense": "paged", "group": 1, "banks": 2}, {"resident": "all"}):
        sizes.clear()
        with Engine(made[0], MockTarget(inner=open_target("htp", threads=1)), max_tokens=70, **options) as engine:
            engine.prefill(prompt(40), logits="all")
        assert {where: found for where, found in sizes.items() if len(found) > 1} == {}


def test_calls_of_graphs_are_the_predicted_ones(made: Made, monkeypatch: pytest.MonkeyPatch) -> None:
    tokens, counts, near = 130, {}, []

    def watch(layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None) -> None:
        if graph == "o_router":
            found = engine.package
            bias = dense_matrix(found, f"layers.{layer}.expert_bias") if found.architecture.expert_bias else None
            choice = found.family.route(np.array(arrays["logits"]), bias)
            counts[layer] = np.bincount(choice.experts.reshape(-1), minlength=engine.package.architecture.experts)

    target = MockTarget(inner=open_target("htp", threads=1))
    with Engine(made[0], target, max_tokens=200) as engine:
        undecided = engine.package.family.undecided

        def spy(logits: np.ndarray, bias: np.ndarray | None = None) -> np.ndarray:
            rows = undecided(logits, bias)
            near.append(len(rows))
            return rows

        monkeypatch.setattr(engine.package.family, "undecided", spy)
        engine.prefill(prompt(tokens), observe=watch)
        package, arch = engine.package, engine.package.architecture
        rungs = [(slots, rows) for slots, rows in reversed(SMALL["ladder"])]
        expected = dense_calls(
            arch,
            tokens,
            rows=SMALL["rows"],
            steps=SMALL["steps"],
            groups=head_groups(arch.attention).groups,
            slices=package.head_slices,
            near=near,
        ) + expert_calls(
            arch,
            tokens,
            {layer: rows.tolist() for layer, rows in counts.items()},
            width=package.pool.panel.width,
            ladder=rungs,
        )
        assert target.runs == expected and len(near) == len(arch.moe_layers)


def test_selftest_passes(olmoe: Made) -> None:
    report = selftest(olmoe[0], "htp", tokens=40, threads=1)
    assert report.ok, report.faults
    assert report.simulated and report.reference and report.graphs == "htp"
    assert {item.graph for item in report.differences} >= {"qkv", "attention", "o_router", "expert", "sum", "head"}
    assert max(item.error for item in report.differences) < 0.05


def test_perplexity_is_that_of_the_reference(olmoe: Made) -> None:
    windows = split_windows(prompt(100), 70)
    open_engine, open_reference = (
        partial(Engine, olmoe[0], "htp", max_tokens=70),
        partial(Engine, olmoe[0], reference=True),
    )
    quality, near = agreement(open_engine, open_reference, windows)
    with Engine(olmoe[0], "htp", max_tokens=70) as engine:
        logits = [engine.prefill(window, logits="all").logits for window in windows]
    losses = [np.log(perplexity_of(one, window)) for one, window in zip(logits, windows, strict=True)]
    assert quality.loss == pytest.approx((69 * losses[0] + 29 * losses[1]) / 98, rel=1e-12)
    assert 0 < abs(near.change) < 0.01 and near.same > 0.97 and 0 < near.divergence < 1e-3
    assert quality.configuration["simulated"] is True


def test_convolutions(tmp_path: Path) -> None:
    """Each graph against the CPU reference, and prompts of a batch, which must not see each other's past."""
    options = {"norm_topk_prob": False, "routed_scaling_factor": 2.5, "tie_word_embeddings": False, "seed": 1}
    package, _ = compiled(tmp_path, "lfm2_moe", experts="int8", **options)
    report = selftest(package, "htp", tokens=40, threads=1)
    assert report.ok, report.faults
    assert {item.graph for item in report.differences} >= {"conv", "qkv", "attention", "o_router", "o_norm", "ffn"}
    prompts = [prompt(length, seed=length) for length in (33, 1, 64, 2)]
    with Engine(package, "htp", max_tokens=100) as engine:
        alone = [engine.prefill(ids, logits="all").logits for ids in prompts]
        for one, together in zip(alone, engine.prefill_batch(prompts, logits="all"), strict=True):
            assert one is not None and together.logits is not None
            assert np.linalg.norm(together.logits - one) <= 1e-3 * np.linalg.norm(one)


def stale_bank(patch: pytest.MonkeyPatch) -> None:
    """Slots keep the first panel that they were bound to."""
    bind = Slots._bind
    patch.setattr(Slots, "_bind", lambda self, slot, panel: self._bound[slot] or bind(self, slot, panel))


def zeroed_output(patch: pytest.MonkeyPatch) -> None:
    run = Slots.run
    patch.setattr(Slots, "run", lambda self, work, normed: [[0 * y for y in ys] for ys in run(self, work, normed)])


def swapped_scales(patch: pytest.MonkeyPatch) -> None:
    def swapped(rung: Rung, panel: PanelLayout) -> list[tuple[str, int, int]]:
        other = {"gate_scale": "mid_scale", "mid_scale": "gate_scale"}
        return [(other.get(name, name), offset, nbytes) for name, offset, nbytes in panel_inputs(rung, panel)]

    patch.setattr("estream.layers.htp.slots.panel_inputs", swapped)


def dropped_rows(patch: pytest.MonkeyPatch) -> None:
    run = Slots.run

    def drop(self: Slots, work: Sequence[Work], normed: np.ndarray) -> list[list[np.ndarray]]:
        return [[np.where(np.arange(len(y))[:, None] == 1, 0, y) for y in ys] for ys in run(self, work, normed)]

    patch.setattr(Slots, "run", drop)


@pytest.mark.parametrize("fault", [stale_bank, zeroed_output, swapped_scales, dropped_rows])
def test_selftest_sees_faults(olmoe: Made, monkeypatch: pytest.MonkeyPatch, fault: Any) -> None:
    fault(monkeypatch)
    report = selftest(olmoe[0], "htp", tokens=12, threads=1)
    assert report.first is not None and (report.first.layer, report.first.graph) == (0, "expert"), report.faults


def test_massive_activations_stay_accurate_through_a_whole_layer(olmoe: Made) -> None:
    """A value of 3000 and a row norm of 20000, as real models have them, put into the hidden state before layer 1."""
    random = np.random.default_rng(5)
    spread = random.standard_normal(64).astype(np.float32)
    deltas: dict[str, np.ndarray] = {}

    def run(backend: str, logits: np.ndarray | None, **options: Any) -> np.ndarray:
        before = chosen = np.zeros(0)

        def watch(layer: int, graph: str, rows: Rows, arrays: Mapping[str, Any], panel: int | None = None) -> None:
            nonlocal before, chosen
            if graph == "input" and layer == 1:
                arrays["hidden"][...] = random_hidden
                arrays["hidden"][0, 7] = 3000
                arrays["hidden"][1] = 20000 * spread / np.linalg.norm(spread)
                before = arrays["hidden"].copy()
            if graph == "o_router" and layer == 1:
                if logits is not None:
                    arrays["logits"][...] = logits
                chosen = arrays["logits"].copy()
            if graph == "input" and layer == 2:
                deltas[backend] = arrays["hidden"] - before

        with Engine(olmoe[0], backend, max_tokens=40, **options) as engine:
            engine.prefill(prompt(40), observe=watch)
        return chosen

    random_hidden = random.standard_normal((40, 64)).astype(np.float32)
    run("htp", run("cpu", None, reference=True))
    error = np.linalg.norm(deltas["htp"] - deltas["cpu"], axis=1) / np.linalg.norm(deltas["cpu"], axis=1)
    assert np.isfinite(deltas["htp"]).all() and error.max() < 2e-2 and np.median(error) < 5e-3, error


def test_a_router_with_tiny_weights_keeps_its_precision(tmp_path: Path) -> None:
    """Weights of 1e-5 are subnormal in float16: unscaled, logits would be off by more than 1 %."""
    package, tiny = compiled(tmp_path, "olmoe", num_hidden_layers=1, scale={"gate.weight": 1e-5})
    ids, seen = prompt(40), []

    def keep(layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None) -> None:
        if graph == "o_router":
            seen.append(arrays["logits"].copy())

    with Engine(package, "htp", max_tokens=40) as engine:
        engine.prefill(ids, logits=None, observe=keep)
    (expected,) = tiny.router_logits(ids)
    assert np.abs(expected).max() < 1e-4
    assert np.linalg.norm(seen[0] - expected) < 4e-3 * np.linalg.norm(expected)


def test_near_ties_are_decided_by_float32_logits(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Errors of router logits against float64 of the same hidden rows, before and after."""
    package, _ = compiled(tmp_path, "qwen2_moe", experts="f16", num_hidden_layers=1)
    seen: dict[str, np.ndarray] = {}

    def keep(layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None) -> None:
        if graph == "o_router":
            seen.update({name: arrays[name].astype(np.float64) for name in ("hidden", "logits")})

    errors = []
    for chosen in (lambda logits, top_k: np.arange(0), lambda logits, top_k: np.arange(len(logits))):
        monkeypatch.setattr("estream.models.base.near_ties", chosen)
        with Engine(package, "htp", max_tokens=40) as engine:
            engine.prefill(prompt(40), logits=None, observe=keep)
            found = engine.package
        norm, router = (dense_matrix(found, f"layers.0.{name}").astype(np.float64) for name in ("ffn_norm", "router"))
        exact = rms_norm(seen["hidden"], norm, found.architecture.norm_eps) @ router
        errors.append(np.linalg.norm(seen["logits"] - exact) / np.linalg.norm(exact))
    assert errors[0] > 1e-4 and errors[1] < 2e-6, errors


def test_nan_is_named_by_layer(olmoe: Made) -> None:
    def poison(layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None) -> None:
        if graph == "o_router" and layer == 1:
            arrays["normed"][3, 0] = np.nan

    with Engine(olmoe[0], "htp", max_tokens=100) as engine:
        with pytest.raises(NumericError, match=r"layer 1, expert panel \d+, token 3: not finite"):
            engine.prefill(prompt(5), observe=poison)
        assert np.isfinite(np.asarray(engine.prefill(prompt(5)).logits)).all()


def test_what_htp_cannot_do_is_refused(tmp_path: Path, olmoe: Made) -> None:
    package, _ = packed(tmp_path, "olmoe", experts="f32")
    with pytest.raises(
        UsageError, match=r"weights that the NPU does not take .asked f16, int8 or int4, had experts f32"
    ):
        Engine(package, "htp")
    with pytest.raises(UsageError, match="unknown SoC 'sm1'"):
        Engine(olmoe[0], "htp", soc="sm1")
    with pytest.raises(UsageError, match="no reference graphs"):
        Engine(olmoe[0], "htp", reference=True)


def test_without_contexts_the_cache_is_filled_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    package, _ = packed(tmp_path, "mixtral", experts="f16", num_hidden_layers=1)
    monkeypatch.setenv("ESTREAM_CACHE", str(tmp_path / "cache"))
    answers = []
    for _ in range(2):
        with Engine(package, "htp", max_tokens=8) as engine:
            answers.append(engine.prefill([1, 2, 3]).logits)
    assert np.array_equal(*answers)
    assert [record.getMessage().partition(":")[0] for record in caplog.records if record.levelname == "WARNING"] == [
        f"no compiled contexts in {package}"
    ]
    monkeypatch.setattr("estream.layers.htp.find.simulated", lambda: False)
    with pytest.raises(TargetError, match=r"no contexts for sm8650.*had none.*estream compile"):
        Engine(package, "htp")
