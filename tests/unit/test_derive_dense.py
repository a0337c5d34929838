"""The pieces of the dense oracle, and that the cut layer at top-k = E is the dense layer."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.derive.checkpoint import layer_tensors
from scripts.derive.cut import cut
from scripts.derive.dense_llama import activations, hidden_states, logits, rms_norm, rotate
from scripts.derive.llama_gguf import Llama, LlamaConfig, LlamaLayer, Vocabulary, unpermute

CONFIG = LlamaConfig(
    layers=2, hidden=16, intermediate=24, heads=4, kv_heads=2, vocab=40, context=64, rope_theta=100.0, norm_eps=1e-5
)
VOCABULARY = Vocabulary(tokens=[], special=[], merges=[], bos=1, eos=2, pad=2, unknown=0, chat_template="")


def tiny(seed: int = 0) -> Llama:
    rng = np.random.default_rng(seed)

    def weight(*shape: int) -> np.ndarray:
        return (rng.standard_normal(shape) / np.sqrt(shape[-1])).astype(np.float32)

    def norm() -> np.ndarray:
        return (1 + 0.1 * rng.standard_normal(16)).astype(np.float32)

    layers = [
        LlamaLayer(
            norm(),
            weight(16, 16),
            weight(8, 16),
            weight(8, 16),
            weight(16, 16),
            norm(),
            weight(24, 16),
            weight(24, 16),
            weight(16, 24),
        )
        for _ in range(CONFIG.layers)
    ]
    return Llama(CONFIG, VOCABULARY, weight(40, 16), layers, norm())


def test_unpermute_undoes_the_gguf_row_order() -> None:
    # Two heads of 4 rows. llama.cpp's converter stores rows 0, 2, 1, 3 of each head: the halves interleaved.
    original = np.arange(8 * 3).reshape(8, 3)
    stored = original[[0, 2, 1, 3, 4, 6, 5, 7]]
    np.testing.assert_array_equal(unpermute(stored, heads=2), original)
    # six rows per head: pairs (0, 3), (1, 4), (2, 5)
    original = np.arange(6 * 2).reshape(6, 2)
    np.testing.assert_array_equal(unpermute(original[[0, 3, 1, 4, 2, 5]], heads=1), original)


def test_rotation_is_relative_and_starts_at_zero() -> None:
    rng = np.random.default_rng(1)
    q, k = (np.repeat(rng.standard_normal((1, 1, 8)), 6, axis=0) for _ in range(2))
    q_turned, k_turned = rotate(q, 100.0)[:, 0], rotate(k, 100.0)[:, 0]
    np.testing.assert_allclose(q_turned[0], q[0, 0])
    np.testing.assert_allclose(q_turned[3] @ k_turned[1], q_turned[5] @ k_turned[3])
    # the first pair (0, D/2) turns by one radian per position
    x = np.zeros((2, 1, 8))
    x[:, :, 0] = 1
    np.testing.assert_allclose(rotate(x, 100.0)[1, 0, [0, 4]], [np.cos(1), np.sin(1)])


def test_sequences_do_not_see_each_other_nor_the_future() -> None:
    model = tiny()
    together = hidden_states(model, [[5, 6, 7], [8, 9, 10, 11]])
    np.testing.assert_allclose(together[:3], hidden_states(model, [[5, 6, 7]]))
    np.testing.assert_allclose(together[3:], hidden_states(model, [[8, 9, 10, 11]]))
    np.testing.assert_allclose(logits(model, [8, 9]), logits(model, [8, 9, 10, 11])[:2])
    assert not np.allclose(logits(model, [9, 8, 3])[2], logits(model, [8, 9, 3])[2])  # order matters


@pytest.mark.parametrize("experts", [1, 2, 4])
def test_a_cut_layer_with_all_experts_equals_the_dense_one(experts: int) -> None:
    model = tiny()
    rng = np.random.default_rng(2)
    cuts = cut(model, [rng.integers(0, 40, 30).tolist() for _ in range(3)], experts=experts, shared=12)
    assert len(cuts) == CONFIG.layers
    for index, (layer, layer_cut) in enumerate(zip(model.layers, cuts, strict=True)):
        tensors = {
            name.removeprefix(f"model.layers.{index}."): value.astype(np.float64)
            for name, value in layer_tensors(index, layer, layer_cut).items()
        }
        x = rms_norm(rng.standard_normal((20, 16)), layer.ffn_norm.astype(np.float64), 1e-5)
        scores = np.exp(x @ tensors["mlp.gate.weight"].T)
        gates = scores / scores.sum(axis=1, keepdims=True)
        gate = 1 / (1 + np.exp(-x @ tensors["mlp.shared_expert_gate.weight"].T))
        found = gate * _swiglu(x, tensors, "mlp.shared_expert")
        for number in range(experts):
            found += gates[:, [number]] * _swiglu(x, tensors, f"mlp.experts.{number}")
        expected = activations(x, layer) @ layer.down.T.astype(np.float64)
        assert np.abs(found - expected).max() < 1e-3 * np.ptp(expected)


def _swiglu(x: np.ndarray, tensors: dict[str, np.ndarray], prefix: str) -> np.ndarray:
    gate = x @ tensors[f"{prefix}.gate_proj.weight"].T
    up = x @ tensors[f"{prefix}.up_proj.weight"].T
    return gate / (1 + np.exp(-gate)) * up @ tensors[f"{prefix}.down_proj.weight"].T
