"""The rate of direct reads: what lanes have in flight does not count, and a read that fails ends the wait."""

from __future__ import annotations

import threading

import pytest

from estream.calibrate.reads import Reads, slope
from estream.errors import FlashError


@pytest.mark.parametrize("lanes", [1, 2, 8])
def test_lanes_that_end_together_read_no_faster(lanes: int) -> None:
    """Under a limit of 1.6 GB/s, `lanes` reads of 16 MB end together every lanes × 10 ms: the end of the half second
    falls anywhere between."""
    size, reads = 16_000_000, 48
    done = [((number // lanes + 1) * lanes * 0.01, size * (number + 1)) for number in range(reads)]
    assert slope(done) == pytest.approx(1.6e9, rel=0.01)


def test_a_slow_device_is_waited_for_until_two_reads() -> None:
    reads = Reads(done=[(0.0, 10)])
    threading.Timer(0.05, lambda: reads.done.extend([(1.0, 20), (2.0, 30)])).start()
    assert reads.rate_since(1) == pytest.approx(10.0)


def test_a_read_that_fails_ends_the_wait() -> None:
    with pytest.raises(FlashError, match="short read"):
        Reads(failed=[FlashError("short read")]).rate_since(0)
