"""Cuts a feed-forward layer's neurons into one shared expert and E balanced routed experts.

The strength of neuron i for a token is |activation_i| * |down column i|, the length of what it adds to the hidden
state, over the length of that hidden state: what is added to a long vector matters less.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Split:
    """Neuron numbers, each ascending: `shared` [S], `experts` [E, R]. Every neuron is in exactly one place."""

    shared: np.ndarray
    experts: np.ndarray


def strengths(active: np.ndarray, down: np.ndarray, hidden: np.ndarray) -> np.ndarray:
    """Strengths [N, I] of activations [N, I] with down weight [H, I] beside the hidden state [N, H]."""
    return np.abs(active) * np.linalg.norm(down, axis=0) / np.linalg.norm(hidden, axis=1, keepdims=True)


def split_neurons(strength: np.ndarray, shared: int, experts: int) -> Split:
    """The `shared` most active neurons, and `experts` groups of the rest, of one size, of what is active together.

    `strength`: [N, I] of the calibration tokens. Raises ValueError if the rest cannot be divided evenly.
    """
    neurons = strength.shape[1]
    if not 0 < shared < neurons or (neurons - shared) % experts:
        raise ValueError(f"{neurons} neurons do not make a shared expert of {shared} and {experts} equal experts")
    order = np.argsort(-np.mean(strength**2, axis=0), kind="stable")
    routed = np.sort(order[shared:])
    profile = strength[:, routed].T
    labels = balanced_groups(profile - profile.mean(axis=1, keepdims=True), experts)
    return Split(np.sort(order[:shared]), np.stack([routed[labels == expert] for expert in range(experts)]))


def balanced_groups(profiles: np.ndarray, groups: int, rounds: int = 30) -> np.ndarray:
    """Spherical k-means with equal group sizes: labels int64 [n] of profiles [n, features]. Deterministic.

    Raises ValueError if n is not a multiple of `groups`.
    """
    count = len(profiles)
    if count % groups:
        raise ValueError(f"{count} profiles do not make {groups} groups of one size")
    unit = profiles / np.maximum(np.linalg.norm(profiles, axis=1, keepdims=True), 1e-12)
    centres = unit[_spread_out(unit, groups)]
    labels = np.full(count, -1)
    for _ in range(rounds):
        found = _assign(unit @ centres.T, count // groups)
        if np.array_equal(found, labels):
            break
        labels = found
        centres = np.stack([unit[labels == group].sum(axis=0) for group in range(groups)])
        centres /= np.maximum(np.linalg.norm(centres, axis=1, keepdims=True), 1e-12)
    return labels


def _spread_out(unit: np.ndarray, groups: int) -> list[int]:
    """First centres: the profile most like all others, then always the one least like those chosen."""
    chosen = [int(np.argmax(unit @ unit.sum(axis=0)))]
    nearest = unit @ unit[chosen[0]]
    while len(chosen) < groups:
        nearest[chosen] = np.inf
        chosen.append(int(np.argmin(nearest)))
        nearest = np.maximum(nearest, unit @ unit[chosen[-1]])
    return chosen


def _assign(scores: np.ndarray, size: int) -> np.ndarray:
    """Labels [n] for scores [n, groups]: each takes its best group with room; a group in demand keeps the best."""
    count, groups = scores.shape
    labels = np.full(count, -1)
    room = np.full(groups, size)
    while (labels < 0).any():
        free = np.flatnonzero(labels < 0)
        wanted = np.where(room > 0, scores[free], -np.inf).argmax(axis=1)
        for group in np.unique(wanted):
            asking = free[wanted == group]
            best = asking[np.argsort(-scores[asking, group], kind="stable")[: room[group]]]
            labels[best] = group
            room[group] -= len(best)
    return labels
