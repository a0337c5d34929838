"""Shared by all tests: hypothesis draws the same examples every time, and never by the clock."""

from __future__ import annotations

from hypothesis import settings

settings.register_profile("estream", derandomize=True, deadline=None, database=None)
settings.load_profile("estream")
