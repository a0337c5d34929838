from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from estream.checkpoint import Checkpoint, reading
from estream.checkpoint import checkpoint as module
from estream.checkpoint.dtypes import widen
from estream.errors import CheckpointError, ClosedError, UnsupportedModelError
from estream.models import family
from estream.models.base import Source
from tests.support.safetensors_files import f32, ramp, write_safetensors

TINY = {
    "model_type": "mixtral",
    "vocab_size": 6,
    "hidden_size": 4,
    "intermediate_size": 3,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "num_local_experts": 2,
    "num_experts_per_tok": 1,
}
ATTENTION = "model.layers.0.self_attn"
MOE = "model.layers.0.block_sparse_moe"
SHAPES = {
    "model.embed_tokens.weight": (6, 4),
    "model.norm.weight": (4,),
    "lm_head.weight": (6, 4),
    "model.layers.0.input_layernorm.weight": (4,),
    "model.layers.0.post_attention_layernorm.weight": (4,),
    f"{ATTENTION}.q_proj.weight": (4, 4),
    f"{ATTENTION}.k_proj.weight": (2, 4),
    f"{ATTENTION}.v_proj.weight": (2, 4),
    f"{ATTENTION}.o_proj.weight": (4, 4),
    f"{MOE}.gate.weight": (2, 4),
    **{f"{MOE}.experts.{e}.{w}.weight": (4, 3) if w == "w2" else (3, 4) for e in (0, 1) for w in ("w1", "w2", "w3")},
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    return tmp_path


def _index(folder: Path, weight_map: Any) -> None:
    (folder / "model.safetensors.index.json").write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))


def _shards(folder: Path, total: int = 3) -> list[Path]:
    """SHAPES dealt onto numbered shards."""
    paths = []
    for number in range(total):
        names = list(SHAPES)[number::total]
        path = folder / f"model-{number + 1:05d}-of-{total:05d}.safetensors"
        paths.append(write_safetensors(path, {name: f32(ramp(*SHAPES[name])) for name in names}))
    return paths


def _single(folder: Path, changes: dict[str, Any] | None = None, name: str = "model.safetensors") -> Path:
    tensors: dict[str, Any] = {name: f32(ramp(*shape)) for name, shape in SHAPES.items()} | (changes or {})
    return write_safetensors(folder / name, {name: tensor for name, tensor in tensors.items() if tensor is not None})


# --- dtypes


def test_bf16_is_the_upper_half_of_f32_bit_for_bit() -> None:
    words = np.arange(1 << 16, dtype="<u2")
    wide = widen(words, "BF16")
    assert wide.dtype == np.float32
    assert np.array_equal(wide.view(np.uint32), np.arange(1 << 16, dtype=np.uint32) * 65536)


def _half(word: int) -> float:
    """IEEE binary16 by the book, in double precision."""
    sign, exponent, fraction = (-1.0) ** (word >> 15), word >> 10 & 31, word & 1023
    if exponent == 31:
        return sign * float("inf") if fraction == 0 else float("nan")
    return sign * (fraction * 2.0**-24 if exponent == 0 else (1 + fraction / 1024) * 2.0 ** (exponent - 15))


def test_f16_all_words() -> None:
    words = np.arange(1 << 16, dtype=np.uint16)
    wide = widen(words.view("<f2"), "F16")
    expected = np.array([_half(int(word)) for word in words], np.float32)
    numbers = ~np.isnan(expected)
    assert np.array_equal(wide[numbers].view(np.uint32), expected[numbers].view(np.uint32))  # -0 and subnormals too
    assert np.isnan(wide[~numbers]).all()
    assert wide[1] == 2.0**-24
    assert np.signbit(wide[0x8000])


def test_f32_words_pass_untouched() -> None:
    words = np.array([0x7FC01234, 0xFF800000, 0x80000000, 0x00000001, 0x7F7FFFFF], np.uint32)
    assert widen(words.view("<f4"), "F32").view(np.uint32).tolist() == words.tolist()
    with pytest.raises(ValueError, match="stored as"):
        widen(words, "F32")


# --- reading


@pytest.fixture
def reader(folder: Path) -> Iterator[Checkpoint]:
    bits = np.array([0x3F80, 0xBF80, 0x7FC0, 0xFF80, 0x8000, 0x0001], "<u2")
    tensors = {
        "m": f32(ramp(5, 3)),
        "v": f32(ramp(4)),
        "s": f32(np.array(7, np.float32)),
        "fused": f32(ramp(3, 4, 2)),
        "b": ("BF16", (2, 3), bits.tobytes()),
        "h": ("F16", (2,), struct.pack("<2e", 0.5, -0.0)),
        "e": ("F32", (0, 3), b""),
        "i": ("I8", (2,), b"12"),
        "f8": ("F8_E4M3", (2,), b"12"),
    }
    write_safetensors(folder / "model.safetensors", tensors)
    with Checkpoint.open(folder) as checkpoint:
        yield checkpoint


def test_names_shapes_and_dtypes(reader: Checkpoint) -> None:
    assert set(reader.names) == {"m", "v", "s", "fused", "b", "h", "e", "i", "f8"}
    assert reader.shape("fused") == (3, 4, 2)
    assert reader.dtype("b") == "BF16"
    assert reader.config == TINY
    for ask in (reader.shape, reader.dtype):
        with pytest.raises(CheckpointError, match="no tensor 'q'"):
            ask("q")


@pytest.mark.parametrize(
    ("source", "expected"),
    [
        (Source("m", (5, 3)), ramp(5, 3)),
        (Source("m", (5, 3), transpose=True), ramp(5, 3).T),
        (Source("m", (5, 3), pick=(2,)), ramp(5, 3)[2]),
        (Source("m", (5, 3), pick=(slice(1, 4),), transpose=True), ramp(5, 3)[1:4].T),
        (Source("m", (5, 3), pick=(slice(0, 5, 2),)), ramp(5, 3)[::2]),
        (Source("m", (5, 3), pick=(slice(3, 9),)), ramp(5, 3)[3:]),
        (Source("v", (4,)), ramp(4)),
        (Source("v", (4,), pick=(slice(1, 3),)), ramp(4)[1:3]),
        (Source("s", ()), np.float32(7)),
        (Source("e", (0, 3)), ramp(0, 3)),
        (Source("e", (0, 3), transpose=True), ramp(0, 3).T),
        (Source("fused", (3, 4, 2), pick=(1,), transpose=True), ramp(3, 4, 2)[1].T),
        (Source("fused", (3, 4, 2), pick=(2, slice(0, 2)), transpose=True), ramp(3, 4, 2)[2, :2].T),
        (Source("fused", (3, 4, 2), pick=(2, slice(0, 4, 2)), transpose=True), ramp(3, 4, 2)[2, ::2].T),
        (Source("fused", (3, 4, 2), pick=(slice(1, 3), 3), transpose=True), ramp(3, 4, 2)[1:3, 3].T),
        (Source("h", (2,)), np.array([0.5, -0.0], np.float32)),
    ],
)
def test_read(reader: Checkpoint, source: Source, expected: np.ndarray) -> None:
    result = reader.read(source)
    assert result.dtype == np.float32
    assert result.flags.c_contiguous
    assert result.shape == expected.shape
    assert result.tobytes() == np.ascontiguousarray(expected).tobytes()


def test_read_widens_bf16_and_transposes(reader: Checkpoint) -> None:
    result = reader.read(Source("b", (2, 3), transpose=True)).view(np.uint32)
    assert result.tolist() == [[0x3F800000, 0xFF800000], [0xBF800000, 0x80000000], [0x7FC00000, 0x00010000]]


@pytest.mark.parametrize("transpose", [False, True])
def test_blocks_and_tiles_give_the_same_bytes(
    reader: Checkpoint, monkeypatch: pytest.MonkeyPatch, transpose: bool
) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 24)  # two rows of m at a time
    monkeypatch.setattr(reading, "_TILE", 2)
    expected = ramp(5, 3).T if transpose else ramp(5, 3)
    assert np.array_equal(reader.read(Source("m", (5, 3), transpose=transpose)), expected)


@pytest.mark.parametrize("transpose", [False, True])
def test_memory_is_the_result_and_a_few_blocks(folder: Path, monkeypatch: pytest.MonkeyPatch, transpose: bool) -> None:
    monkeypatch.setattr(module, "_BLOCK_BYTES", 1 << 16)
    words = np.arange(1 << 20, dtype="<u2").reshape(1024, 1024)
    write_safetensors(folder / "model.safetensors", {"m": ("BF16", words.shape, words.tobytes())})
    with Checkpoint.open(folder) as checkpoint:
        tracemalloc.start()
        result = checkpoint.read(Source("m", words.shape, transpose=transpose))
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
    assert result.nbytes < peak < result.nbytes + (1 << 20)


def test_only_the_picked_bytes_are_read(reader: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    read: list[int] = []
    preadv = os.preadv

    def counting(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append(count := preadv(fd, buffers, offset))
        return count

    monkeypatch.setattr(os, "preadv", counting)
    reader.read(Source("fused", (3, 4, 2), pick=(1, slice(2, 4)), transpose=True))
    assert sum(read) == 2 * 2 * 4


def test_short_reads_are_continued(reader: Checkpoint, monkeypatch: pytest.MonkeyPatch) -> None:
    preadv, read = os.preadv, []

    def short(fd: int, buffers: list[memoryview], offset: int) -> int:
        read.append(offset)
        return preadv(fd, [buffers[0][:5]], offset)

    monkeypatch.setattr(os, "preadv", short)
    assert np.array_equal(reader.read(Source("m", (5, 3))), ramp(5, 3))
    assert read == list(range(read[0], read[0] + 5 * 3 * 4, 5))


def test_gather_puts_columns_side_by_side(reader: Checkpoint) -> None:
    m, fused = Source("m", (5, 3), pick=(slice(0, 2),), transpose=True), Source("m", (5, 3), (slice(4, 5),), True)
    expected = np.concatenate([ramp(5, 3)[:2].T, ramp(5, 3)[4:].T], axis=1)
    assert np.array_equal(reader.gather((m, fused)), expected)
    assert reader.gather((m, fused)).flags.c_contiguous
    assert np.array_equal(reader.gather((m,)), reader.read(m))


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (Source("q", (1,)), "no tensor 'q'"),
        (Source("m", (3, 5)), r"'m' \(asked \[3, 5\], had \[5, 3\]\)"),
        (Source("i", (2,)), "'i' has dtype I8"),
        (Source("f8", (2,)), "weight_block_size, which FP8 weights need"),
        (Source("m", (5, 3), pick=(5,)), "'m': index"),
        (Source("m", (5, 3), pick=(-1,)), "'m': index"),
    ],
)
def test_read_refuses(reader: Checkpoint, source: Source, message: str) -> None:
    with pytest.raises(CheckpointError, match=message):
        reader.read(source)


def test_a_file_that_shrinks_is_an_error(reader: Checkpoint, folder: Path) -> None:
    os.truncate(folder / "model.safetensors", 100)
    with pytest.raises(CheckpointError, match="'m': the file was truncated"):
        reader.read(Source("m", (5, 3)))


def test_close_twice_and_read_after_close(folder: Path) -> None:
    _single(folder)
    before = len(os.listdir("/proc/self/fd"))
    checkpoint = Checkpoint.open(folder)
    checkpoint.close()
    checkpoint.close()
    assert len(os.listdir("/proc/self/fd")) == before
    with pytest.raises(ClosedError, match="closed"):
        checkpoint.read(Source("model.norm.weight", (4,)))


# --- which files


def _assert_complete(folder: Path) -> None:
    with Checkpoint.open(folder) as checkpoint:
        checkpoint.check(checkpoint.family())
        assert np.array_equal(checkpoint.read(Source("lm_head.weight", (6, 4))), ramp(6, 4))


def test_single_file_and_a_stale_index_beside_it(folder: Path) -> None:
    _single(folder)
    _assert_complete(folder)
    _index(folder, {"lm_head.weight": "model-00001-of-00002.safetensors"})
    _assert_complete(folder)
    _index(folder, {name: "model.safetensors" for name in SHAPES})
    _assert_complete(folder)


def test_shards_with_an_index_without_one_and_with_a_wrong_one(folder: Path) -> None:
    paths = _shards(folder)
    _assert_complete(folder)
    _index(folder, {name: paths[number % 3].name for number, name in enumerate(SHAPES)})
    _assert_complete(folder)
    _index(folder, {name: paths[0].name for name in SHAPES})  # the headers are the truth
    _assert_complete(folder)
    _index(folder, {name: "old-00001-of-00007.safetensors" for name in SHAPES})  # of a checkpoint that is gone
    _assert_complete(folder)


def test_files_with_names_of_their_own(folder: Path) -> None:
    _single(folder, name="weights.safetensors")
    _assert_complete(folder)
    _single(folder, name="consolidated.safetensors")
    with pytest.raises(CheckpointError, match=r"two files: consolidated.safetensors and weights.safetensors"):
        Checkpoint.open(folder)
    _index(folder, {name: "weights.safetensors" for name in SHAPES})
    _assert_complete(folder)


@pytest.mark.parametrize("write", [_single, _shards])
def test_stray_files_are_not_read(folder: Path, write: Any) -> None:
    write(folder)
    _single(folder, name="consolidated.safetensors")
    (folder / "pytorch_model.bin").write_bytes(b"pickle")
    _assert_complete(folder)


@pytest.mark.parametrize("indexed", [False, True])
@pytest.mark.parametrize("lost", [0, 1, 2])
def test_a_missing_shard_is_named(folder: Path, indexed: bool, lost: int) -> None:
    paths = _shards(folder)
    if indexed:
        _index(folder, {name: paths[number % 3].name for number, name in enumerate(SHAPES)})
    paths[lost].unlink()
    with pytest.raises(CheckpointError, match=f"missing shards: {paths[lost].name}"):
        Checkpoint.open(folder)


def test_all_shards_missing_but_the_index(folder: Path) -> None:
    _index(folder, {"lm_head.weight": "model-00001-of-00002.safetensors"})
    with pytest.raises(CheckpointError, match=r"missing shards: model-00001-of-00002.safetensors, model-00002-of"):
        Checkpoint.open(folder)


def test_two_sets_of_shards_are_ambiguous(folder: Path) -> None:
    _shards(folder, 2)
    _shards(folder, 3)
    with pytest.raises(CheckpointError, match="several sets of shards"):
        Checkpoint.open(folder)


@pytest.mark.parametrize("name", ["../x.safetensors", "/etc/x.safetensors", "sub/x.safetensors", "..", 3, "x.bin"])
def test_an_index_that_points_elsewhere_is_refused(folder: Path, name: Any) -> None:
    _shards(folder)
    _index(folder, {"lm_head.weight": name})
    with pytest.raises(CheckpointError, match=r"'lm_head.weight' lies in a file that is not"):
        Checkpoint.open(folder)


def test_shards_may_be_links(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> None:
    blobs = tmp_path_factory.mktemp("blobs")
    for path in _shards(folder):
        path.rename(blobs / path.name)
        path.symlink_to(blobs / path.name)
    _assert_complete(folder)


@pytest.mark.parametrize("name", ["pytorch_model.bin", "consolidated.00.pt", "model.pth"])
def test_pickles_are_refused(folder: Path, name: str) -> None:
    (folder / name).write_bytes(b"")
    with pytest.raises(CheckpointError, match=f"{name} may be a pickle.*safetensors"):
        Checkpoint.open(folder)


def test_what_is_no_checkpoint(folder: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no safetensors file.*Give the directory"):
        Checkpoint.open(folder)
    (folder / "model.gguf").write_bytes(b"")
    with pytest.raises(CheckpointError, match="GGUF"):
        Checkpoint.open(folder)
    with pytest.raises(CheckpointError, match="no such directory"):
        Checkpoint.open(tmp_path / "absent")
    with pytest.raises(CheckpointError, match="is not a directory"):
        Checkpoint.open(folder / "config.json")
    for text, message in (("{", "is not JSON"), ("[]", "is not a JSON object"), ("\xff", "is not JSON")):
        (folder / "config.json").write_text(text, encoding="latin-1")
        with pytest.raises(CheckpointError, match=f"config.json: {message}"):
            Checkpoint.open(folder)
    (folder / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"config.json: cannot be read"):
        Checkpoint.open(folder)


def test_a_damaged_shard_is_named_and_nothing_stays_open(folder: Path) -> None:
    paths = _shards(folder)
    os.truncate(paths[2], paths[2].stat().st_size - 1)
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(CheckpointError, match=r"model-00003-of-00003.safetensors: truncated"):
        Checkpoint.open(folder)
    assert len(os.listdir("/proc/self/fd")) == before


# --- check


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"lm_head.weight": None}, "1 missing: lm_head.weight"),
        ({name: None for name in SHAPES if "experts" in name}, r"6 missing: .*w1.weight, .* and 2 more"),
        ({"lm_head.weight": f32(ramp(5, 4))}, r"1 with another shape: lm_head.weight asked \[6, 4\] had \[5, 4\]"),
        (
            {"model.norm.weight": ("I8", (4,), b"1234")},
            "1 of a dtype other than F32, F16, BF16, F8_E4M3: model.norm.weight I8",
        ),
        ({"extra": f32(ramp(1))}, "1 unexpected: extra"),
        ({"extra": f32(ramp(1)), "lm_head.weight": None}, "1 missing: lm_head.weight; 1 unexpected: extra"),
    ],
)
def test_check_lists_the_offenders(folder: Path, changes: dict[str, Any], message: str) -> None:
    _single(folder, changes)
    with Checkpoint.open(folder) as checkpoint, pytest.raises(CheckpointError, match=message):
        checkpoint.check(checkpoint.family())


def test_check_accepts_stored_rotary_frequencies_and_a_tied_head(folder: Path) -> None:
    changes = {f"{ATTENTION}.rotary_emb.inv_freq": f32(ramp(1)), "lm_head.weight": None}
    _single(folder, changes)
    with Checkpoint.open(folder) as checkpoint:
        tied = family("mixtral").from_config(TINY | {"tie_word_embeddings": True})
        checkpoint.check(tied)
        head = checkpoint.gather(tied.model_sources(checkpoint.names)["head"])
        assert np.array_equal(head, ramp(6, 4).T)


def test_family_of_the_config(folder: Path) -> None:
    _single(folder)
    for model_type, error, message in (
        ("llama", UnsupportedModelError, "unknown model_type .asked 'llama', had deepseek_v2, "),
        (None, CheckpointError, "has no model_type"),
    ):
        (folder / "config.json").write_text(json.dumps(TINY | {"model_type": model_type}))
        with Checkpoint.open(folder) as checkpoint, pytest.raises(error, match=message):
            checkpoint.family()


def test_tokenizer_files(folder: Path) -> None:
    _single(folder)
    for name in ("tokenizer.json", "merges.txt", "README.md", "tokenizer_config.json"):
        (folder / name).write_text("{}")
    with Checkpoint.open(folder) as checkpoint:
        found = checkpoint.tokenizer_files()
    assert [path.name for path in found] == ["tokenizer.json", "tokenizer_config.json", "merges.txt"]
