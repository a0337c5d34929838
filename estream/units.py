"""Sizes, times and rates as people write and read them.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import re
from fractions import Fraction

from estream.errors import UsageError

# KB, MB, … are powers of 1000. KiB, MiB, … are powers of 1024, and so are the bare letters, as in cgroups and dd.
_FACTORS = {"": 1, "b": 1}
for _power, _letter in enumerate("kmgt", start=1):
    _FACTORS[_letter] = _FACTORS[f"{_letter}ib"] = 1024**_power
    _FACTORS[f"{_letter}b"] = 1000**_power

_SIZE = re.compile(r"\s*([0-9]{1,19}(?:\.[0-9]{1,18})?)\s*([a-z]*)\s*", re.ASCII | re.IGNORECASE)
_LARGEST = (1 << 63) - 1


def parse_size(text: str) -> int:
    """Bytes meant by '1.5GiB', '800M', '2 GB' or '4096'; part of a byte is dropped.

    Raises:
        UsageError: not a size, less than one byte, or more than 2^63 − 1 bytes.
    """
    match = _SIZE.fullmatch(text)
    factor = _FACTORS.get(match[2].lower()) if match else None
    if match is None or factor is None:
        raise UsageError("not a size", asked=repr(text), next_step="Write it like 1.5GiB, 800M, 2GB or 4096.")
    nbytes = int(Fraction(match[1]) * factor)
    if not 0 < nbytes <= _LARGEST:
        raise UsageError("size out of range", asked=repr(text), had="1 byte to 2^63 - 1 bytes")
    return nbytes


def _scaled(value: float, step: int, units: tuple[str, ...]) -> str:
    """`value` in the largest unit that keeps it at 1 or more, with three significant digits."""
    power = 0
    # 999.5 would print as 1000: carry it into the next unit first.
    while power + 1 < len(units) and abs(value) >= step * (1 - 0.5e-3):
        value /= step
        power += 1
    digits = 0 if power == 0 and value == int(value) else max(0, 3 - len(str(int(abs(value) + 1e-9))))
    return f"{value:.{digits}f} {units[power]}"


def format_bytes(nbytes: float) -> str:
    """'512 B', '16.0 KiB', '1.50 GiB'."""
    return _scaled(nbytes, 1024, ("B", "KiB", "MiB", "GiB", "TiB"))


def format_rate(bytes_per_second: float) -> str:
    """'1.23 GB/s': powers of 1000, as storage is specified."""
    return _scaled(bytes_per_second, 1000, ("B/s", "kB/s", "MB/s", "GB/s", "TB/s"))


def format_count(count: int, noun: str) -> str:
    """'1 window', '2 windows'."""
    return f"{count} {noun}{'' if count == 1 else 's'}"


def format_tokens(tokens: int) -> str:
    """'1 token', '2 tokens'."""
    return format_count(tokens, "token")


def format_seconds(seconds: float) -> str:
    """'850 ms', '12.3 s', '4 min 05 s', '2 h 03 min'."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-3 else f"{seconds * 1e6:.0f} us"
    if seconds < 119.95:
        return f"{seconds:.2f} s" if seconds < 9.995 else f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 7200:
        return f"{whole // 60} min {whole % 60:02d} s"
    return f"{whole // 3600} h {whole % 3600 // 60:02d} min"
