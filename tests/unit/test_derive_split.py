"""Neurons into experts, and the router over them, on toy data."""

from __future__ import annotations

import numpy as np
import pytest

from scripts.derive.router import SPREAD, ridge, scaled, targets
from scripts.derive.split import Split, balanced_groups, split_neurons, strengths


def test_strengths_weigh_activations_by_their_down_column() -> None:
    active = np.array([[3.0, -2.0], [0.0, 1.0]])
    down = np.array([[1.0, 0.0], [0.0, 2.0]])  # column lengths 1 and 2
    hidden = np.array([[3.0, 4.0], [0.0, 2.0]])  # row lengths 5 and 2
    np.testing.assert_allclose(strengths(active, down, hidden), [[3 / 5, 4 / 5], [0, 2 / 2]])


def test_groups_find_what_is_active_together() -> None:
    rng = np.random.default_rng(0)
    truth = rng.permutation(np.repeat(np.arange(4), 6))
    patterns = np.eye(4).repeat(25, axis=1)  # each group is active on its own 25 tokens
    labels = balanced_groups(patterns[truth] + 0.1 * rng.standard_normal((24, 100)), 4)
    assert len({(a, b) for a, b in zip(truth, labels, strict=True)}) == 4


@pytest.mark.parametrize("groups", [1, 3, 8])
def test_groups_are_balanced_whatever_the_profiles(groups: int) -> None:
    rng = np.random.default_rng(1)
    lopsided = np.abs(rng.standard_normal((48, 5))) + 100 * np.eye(1, 5)  # all want the same group
    for profiles in (lopsided, np.zeros((48, 5)), np.ones((48, 5))):
        assert np.bincount(balanced_groups(profiles, groups), minlength=groups).tolist() == [48 // groups] * groups


def test_split_shares_the_strongest_and_keeps_every_neuron_once() -> None:
    rng = np.random.default_rng(2)
    strength = np.abs(rng.standard_normal((50, 20)))
    strong = [2, 3, 7, 11, 19, 0, 5, 13]
    strength[:, strong] += 10
    split = split_neurons(strength, shared=8, experts=3)
    assert split.shared.tolist() == sorted(strong)
    assert split.experts.shape == (3, 4)
    assert sorted([*split.shared, *split.experts.ravel()]) == list(range(20))


def test_uneven_splits_are_refused() -> None:
    with pytest.raises(ValueError, match="20 neurons"):
        split_neurons(np.ones((3, 20)), shared=8, experts=5)
    with pytest.raises(ValueError, match="10 profiles"):
        balanced_groups(np.ones((10, 2)), 3)


def test_ridge_recovers_a_linear_map_and_shrinks_with_the_penalty() -> None:
    rng = np.random.default_rng(3)
    x, truth = rng.standard_normal((200, 6)), rng.standard_normal((3, 6))
    np.testing.assert_allclose(ridge(x, x @ truth.T, penalty=0.0), truth, atol=1e-9)
    gram = x.T @ x
    expected = np.linalg.solve(gram + 0.5 * np.trace(gram) / 6 * np.eye(6), x.T @ (x @ truth.T)).T
    np.testing.assert_allclose(ridge(x, x @ truth.T, penalty=0.5), expected)


def test_scaled_router_has_equal_gates_and_the_same_order() -> None:
    rng = np.random.default_rng(4)
    x, weight = rng.standard_normal((300, 16)), rng.standard_normal((8, 16)) * 7 + 3
    router = scaled(weight, x)
    logits = x @ router.T.astype(np.float64)
    assert SPREAD / 2 < np.abs(logits).max() <= SPREAD * (1 + 1e-6)
    gates = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    assert np.abs(gates * 8 - 1).max() < 1.1 * SPREAD
    np.testing.assert_array_equal(np.argsort(logits, axis=1), np.argsort(x @ weight.T, axis=1))


def test_router_targets_are_the_lengths_of_expert_outputs() -> None:
    active = np.array([[3.0, 4.0, 1.0, 1.0, 9.0]])
    down = np.array([[1.0, 0.0, 1.0, -1.0, 5.0], [0.0, 1.0, 2.0, 1.0, 5.0]])
    split = Split(shared=np.array([4]), experts=np.array([[0, 1], [2, 3]]))  # outputs (3, 4) and (0, 3)
    hidden = np.array([[0.0, 2.0]])
    np.testing.assert_allclose(targets(active, down, hidden, split), [[0.5, -0.5]])
