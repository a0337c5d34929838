"""`estream selftest`: does a target compute what the reference lowering computes? Run-time part: numpy only."""

from __future__ import annotations

from estream.selftest.report import SelftestReport
from estream.selftest.run import TOKENS, selftest

__all__ = ["TOKENS", "SelftestReport", "selftest"]
