"""Shared by all tests: hypothesis draws the same examples every time, and never by the clock."""

from __future__ import annotations

import signal

from hypothesis import settings

# A background job of a shell starts with SIGINT ignored, and would hand that on to the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("estream", derandomize=True, deadline=None, database=None)
settings.load_profile("estream")
