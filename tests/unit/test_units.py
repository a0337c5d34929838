"""Sizes, times and rates, written and read."""

from __future__ import annotations

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from estream.errors import UsageError
from estream.units import format_bytes, format_rate, format_seconds, parse_size


@pytest.mark.parametrize(
    ("text", "nbytes"),
    [
        ("4096", 4096),
        ("1B", 1),
        ("800M", 800 * 1024**2),
        ("800MB", 800 * 1000**2),
        ("1.5GiB", 3 * 512 * 1024**2),
        (" 2 gb ", 2 * 1000**3),
        ("0.3KiB", 307),
        ("1T", 1024**4),
        ("9223372036854775807", (1 << 63) - 1),
    ],
)
def test_sizes_read(text: str, nbytes: int) -> None:
    assert parse_size(text) == nbytes


@pytest.mark.parametrize(
    "text", ["", "G", "1.G", ".5G", "-1G", "1e9", "1 GiB x", "1,5G", "nan", "inf", "1PB", "١G", "0x10"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(UsageError, match="not a size"):
        parse_size(text)


@pytest.mark.parametrize("text", ["0", "0.0G", "0.5B", "9223372036854775808", "9" * 18 + "T"])
def test_sizes_out_of_range(text: str) -> None:
    with pytest.raises(UsageError, match="out of range"):
        parse_size(text)


@given(st.integers(1, 1 << 62))
def test_written_bytes_read_back_within_their_digits(nbytes: int) -> None:
    assert parse_size(f"{nbytes}B") == nbytes
    assert parse_size(format_bytes(nbytes)) == pytest.approx(nbytes, rel=0.006)


@given(st.text())
def test_any_text_is_a_size_or_a_usage_error(text: str) -> None:
    with contextlib.suppress(UsageError):
        assert parse_size(text) >= 1


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (1023, "1023 B"),
        (1024, "1.00 KiB"),
        (16384, "16.0 KiB"),
        (1024**2 - 1, "1.00 MiB"),
        (3 * 512 * 1024**2, "1.50 GiB"),
        (5000 * 1024**4, "5000 TiB"),
    ],
)
def test_bytes(nbytes: int, text: str) -> None:
    assert format_bytes(nbytes) == text


@pytest.mark.parametrize(
    ("rate", "text"), [(0, "0 B/s"), (999.9, "1.00 kB/s"), (1.234e9, "1.23 GB/s"), (45.6e6, "45.6 MB/s")]
)
def test_rates(rate: float, text: str) -> None:
    assert format_rate(rate) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (0, "0 us"),
        (12e-6, "12 us"),
        (0.0425, "42.5 ms"),
        (0.9994, "999 ms"),
        (0.99999, "1.00 s"),
        (9.999, "10.0 s"),
        (61.25, "61.2 s"),
        (119.99, "2 min 00 s"),
        (245, "4 min 05 s"),
        (7380, "2 h 03 min"),
    ],
)
def test_seconds(seconds: float, text: str) -> None:
    assert format_seconds(seconds) == text
