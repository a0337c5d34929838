"""Which way a prompt is read: short ones only what they were routed to."""

from __future__ import annotations

import pytest

from estream.solver.automatic import prefetch_for


@pytest.mark.parametrize(
    ("experts", "top_k", "tokens", "mode"),
    [
        (64, 8, 16, "after-routing"),
        (64, 8, 27, "after-routing"),
        (64, 8, 34, "after-routing"),
        (64, 8, 35, "before-routing"),  # 63.4 of 64 experts are expected to be needed
        (128, 8, 66, "after-routing"),
        (128, 8, 80, "before-routing"),
        (8, 2, 16, "after-routing"),
        (8, 2, 17, "before-routing"),
    ],
)
def test_automatic_prefetch_follows_the_expected_coverage(experts: int, top_k: int, tokens: int, mode: str) -> None:
    assert prefetch_for("auto", experts, top_k, tokens) == mode
    assert prefetch_for("on-demand", experts, top_k, tokens) == "on-demand"
