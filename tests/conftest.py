"""Shared by all tests: hypothesis draws the same examples every time, and never by the clock."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import settings

# A background job of a shell starts with SIGINT ignored, and would hand that on to the commands that tests interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)

settings.register_profile("estream", derandomize=True, deadline=None, database=None)
settings.load_profile("estream")


@pytest.fixture(scope="session", autouse=True)
def _own_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """A profile of this machine in the user's cache would change what engines choose."""
    before = os.environ.get("ESTREAM_CACHE")
    os.environ["ESTREAM_CACHE"] = str(tmp_path_factory.mktemp("cache"))
    yield
    if before is None:
        del os.environ["ESTREAM_CACHE"]
    else:
        os.environ["ESTREAM_CACHE"] = before
