"""The int4 scheme: bytes of a panel, error bounds, what is refused."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream.cli.main import main
from estream.errors import PackageError, UsageError
from estream.package.layout import PanelLayout, default_dense, default_panel_width
from estream.package.manifest import Manifest
from estream.package.pack import pack
from estream.package.quantise import channel_magnitudes, panel_bytes, part_views, to_int4
from estream.package.reader import Package
from estream.package.verify import verify
from estream.package.writer import Packing
from tests.support.schemes import panel_numbers, unpack_int4
from tests.support.tiny_packages import OLMOE, QWEN2_MOE, write_checkpoint

NAMES = ("gate.weight", "up.weight", "down.weight")


@pytest.fixture(autouse=True)
def no_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Packing, "graphs", lambda self: {})


def test_golden_bytes() -> None:
    weights = np.zeros((128, 3), np.float32)
    weights[:, 0] = 127 / 128  # every group is full
    weights[:, 1] = np.where(np.arange(128) < 32, 1, -1) * 0.25  # the first group of another sign
    weights[64, 2] = 254 / 128  # one weight of the high half, the rest zeros
    magnitude = channel_magnitudes(weights, 0, "w")
    packed, multiplier = to_int4(weights, 0, magnitude)
    assert packed.shape == (64, 3) and packed.dtype == multiplier.dtype == np.uint8 and multiplier.shape == (4, 3)
    assert magnitude[[0, 2]].tolist() == [1, 2] and 0.25 * 128 / 127 <= float(magnitude[1]) < 0.2523
    assert (multiplier[:, 0] == 18).all() and (packed[:, 0] == 0xFF).all()  # 7 · 18 = 126
    assert (packed[:32, 1] == 0x1F).all() and (packed[32:, 1] == 0x11).all()  # low 7, then −7; high −7
    assert multiplier[:, 2].tolist() == [1, 1, 18, 1]
    assert packed[:, 2].tolist() == [0xF8] + [0x88] * 63


def test_scales_per_input_channel() -> None:
    weights = np.outer(np.arange(1, 65) * (127 / 128), np.ones(5)).astype(np.float32)
    magnitude = channel_magnitudes(weights, 1, "w")
    packed, multiplier = to_int4(weights, 1, magnitude)
    assert magnitude.tolist() == list(range(1, 65))
    assert (packed == 0xFF).all() and (multiplier == 18).all()


def test_parts_of_a_panel() -> None:
    layout = PanelLayout(128, 64, "int4")
    parts = {part.name: (part.dtype, part.shape) for part in layout.parts}
    assert parts == {
        "gate": ("U8", (64, 64)),
        "up": ("U8", (64, 64)),
        "down": ("U8", (32, 128)),
        "gate_scale": ("F16", (64,)),
        "mid_scale": ("F16", (64,)),
        "gate_multiplier": ("U8", (4, 64)),
        "up_multiplier": ("U8", (4, 64)),
        "down_multiplier": ("U8", (2, 128)),
    }
    assert all(part.offset % 128 == 0 for part in layout.parts)
    wide = PanelLayout(2048, 256, "int4")
    bits = 8 * sum(part.nbytes for part in wide.parts if part.dtype == "U8") / (3 * 2048 * 256)
    assert bits == 4.25


@given(
    seed=st.integers(0, 2**32 - 1),
    axis=st.sampled_from([0, 1]),
    groups=st.sampled_from([2, 4, 6]),
    columns=st.integers(1, 9),
    spread=st.floats(0, 3),
    exponent=st.integers(-30, 8),
)
def test_round_trip_bounds(seed: int, axis: int, groups: int, columns: int, spread: float, exponent: int) -> None:
    """Every integer stays in 8 bits; no weight is further off than half a step of the widest grid tried, or is clipped
    by more than the narrowest one clips."""
    draw = np.random.default_rng(seed)
    weights = draw.standard_normal((32 * groups, columns)) * np.exp(spread * draw.standard_normal((32 * groups, 1)))
    weights = np.ldexp(weights, exponent).astype(np.float32)
    weights = np.clip(weights, -60000, 60000)
    magnitude = channel_magnitudes(weights, axis, "w")
    packed, multiplier = to_int4(weights, axis, magnitude)
    assert multiplier.min() >= 1 and multiplier.max() <= 18
    assert (packed & 15).min() >= 1 and (packed >> 4).min() >= 1
    # How the NPU splits a byte: value = low + 16 · high, and without the nibble 0 no division is a tie.
    np.testing.assert_array_equal(np.rint((packed - 136.0) / 16), (packed >> 4) - 8.0)
    step = np.expand_dims(magnitude / np.float64(128), axis)
    integers = unpack_int4(packed, multiplier)
    assert np.abs(integers).max() <= 126
    exact = weights / step
    largest = np.abs(exact).reshape(groups, 32, columns).max(axis=1)
    widest = np.clip(np.rint(largest / 7.5) + 1, 1, 18)
    narrowest = np.clip(np.rint(largest / 7.5) - 1, 1, 18)
    bound = np.maximum(widest / 2, largest - 7 * narrowest)
    assert (np.abs(integers - exact) <= np.repeat(bound, 32, axis=0) + 1e-3).all()


@pytest.mark.parametrize("axis", [0, 1])
def test_error_of_normal_weights(axis: int) -> None:
    """One scale per group in float16 at largest / 7 would have 0.097."""
    weights = np.random.default_rng(axis).standard_normal((1024, 64)).astype(np.float32)
    magnitude = channel_magnitudes(weights, axis, "w")
    got = unpack_int4(*to_int4(weights, axis, magnitude)) * np.expand_dims(magnitude / np.float64(128), axis)
    assert np.linalg.norm(got - weights) / np.linalg.norm(weights) < 0.097


def test_missing_channels_are_zeros_with_scale_and_multiplier_one() -> None:
    layout = PanelLayout(64, 128, "int4")
    draw = np.random.default_rng(2)
    gate, up = (draw.standard_normal((64, 70)).astype(np.float32) for _ in range(2))
    panel = panel_bytes(layout, gate, up, draw.standard_normal((70, 64)).astype(np.float32), NAMES)
    numbers, views = panel_numbers(layout, panel), part_views(layout, panel)
    assert not numbers["gate"][:, 70:].any() and not numbers["up"][:, 70:].any() and not numbers["down"][70:].any()
    assert numbers["down"][64:70].any()  # a group of six channels
    assert (views["gate_scale"][70:] == 1).all() and (views["mid_scale"][70:] == 1).all()
    assert (views["gate_multiplier"][:, 70:] == 1).all() and (views["down_multiplier"][3:] == 1).all()


def test_pack_verify_and_damage(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    weights = write_checkpoint(tmp_path / "in", OLMOE)
    out = tmp_path / "out.estream"
    assert main(["pack", str(tmp_path / "in"), str(out), "--experts", "int4", "--panel", "64", "--json", "-q"]) == 0
    answer = json.loads(capsys.readouterr().out)
    assert (answer["experts"], answer["dense"], answer["panels_per_expert"]) == ("int4", "int8", 2)
    package = Package.open(out)
    assert package.dense["layers.0.q"].dtype == "U8" and package.dense["layers.0.q.scale"].dtype == "F16"
    pool = package.pool
    got = np.zeros((64, 128))
    for panel in range(2):  # expert 1 of layer 1
        start = pool.panel_offset(1, 2 + panel)
        stored = np.fromfile(package.experts_file, np.uint8, pool.panel.panel_bytes, offset=start)
        numbers = panel_numbers(pool.panel, stored)
        got[:, 64 * panel : 64 * (panel + 1)] = numbers["gate"] * numbers["gate_scale"]
    exact = weights["model.layers.1.mlp.experts.1.gate_proj.weight"].T
    assert np.linalg.norm(got[:, :80] - exact) < 0.1 * np.linalg.norm(exact)
    # The channels to spare repeat those whose down row was split.
    distances = [np.linalg.norm(exact - column[:, None], axis=0).min() for column in got[:, 80:].T]
    assert max(distances) < 0.2 * np.linalg.norm(exact, axis=0).max() and got[:, 80:].any(axis=0).all()
    assert verify(out).ok
    part = next(part for part in pool.panel.parts if part.name == "down_multiplier")
    with open(package.experts_file, "r+b") as file:
        file.seek(pool.panel_offset(1, 3) + part.offset)
        file.write(b"\x00")  # no multiplier is 0
    assert verify(out).damaged == ("layers.1.experts.1 panel 1",)


def test_what_does_not_fit_is_refused(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "narrow", QWEN2_MOE)  # hidden size 32: half a group per half
    with pytest.raises(UsageError, match=r"experts in int4: hidden size .asked 32, had .*multiples of 64.*int8"):
        pack(tmp_path / "narrow", tmp_path / "out", experts="int4")
    write_checkpoint(tmp_path / "in", OLMOE)
    with pytest.raises(UsageError, match=r"--panel: panel width .asked 32, had a multiple of 64 of at most 128"):
        pack(tmp_path / "in", tmp_path / "out", experts="int4", panel=32)
    with pytest.raises(UsageError, match=r"--dense: unknown weight scheme .asked int4, had f32, f16, int8"):
        pack(tmp_path / "in", tmp_path / "out", experts="int4", dense="int4")
    assert not (tmp_path / "out").exists()


def test_manifest_refuses_what_packing_would(tmp_path: Path) -> None:
    write_checkpoint(tmp_path / "in", OLMOE)
    pack(tmp_path / "in", tmp_path / "out", experts="int4")
    text = (tmp_path / "out" / "model.json").read_text()
    assert Manifest.from_json(text.encode()).dense == "int8"
    with pytest.raises(PackageError, match=r"field dense .asked f32\|f16\|int8, had"):
        Manifest.from_json(text.replace('"dense": "int8"', '"dense": "int4"').encode())
    with pytest.raises(PackageError, match=r"field panel\.width .asked a positive multiple of 64, had 96"):
        Manifest.from_json(text.replace('"width": 128', '"width": 96').encode())


def test_inspect_leaves_out_a_scheme_that_does_not_fit(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, config, fits in (("olmoe", OLMOE, True), ("qwen", QWEN2_MOE, False)):
        write_checkpoint(tmp_path / name, config)
        assert main(["inspect", str(tmp_path / name), "--json"]) == 0
        packed = json.loads(capsys.readouterr().out)["packed"]
        assert ("int4" in packed) is fits and "int8" in packed


def test_defaults() -> None:
    assert [default_dense(scheme) for scheme in ("f32", "f16", "int8", "int4")] == ["f32", "f16", "int8", "int8"]
    assert default_panel_width(2048, 1024, "int4") == 1024
    assert default_panel_width(4096, 14336, "int4") == 1024
    assert default_panel_width(2880, 2880, "int4") == 768  # 4 panels, the last of 576 channels
    assert default_panel_width(1 << 20, 300, "int4") == 64
    assert default_panel_width(64, 40, "int4") == 64
