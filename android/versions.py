"""Version numbers as the downloads write them: 1.24.1, 2.51.0.260929181845, 1:3.3.2-1."""

from __future__ import annotations

import re


def numbers(version: str) -> tuple[int, ...]:
    """The leading numbers, without Debian's epoch: '1:3.12.7-2' → (3, 12, 7)."""
    match = re.match(r"\d+(\.\d+)*", version.rpartition(":")[2])
    return tuple(int(part) for part in match[0].split(".")) if match else ()


def at_least(version: str, least: str) -> bool:
    return numbers(version) >= numbers(least)


def same_build(asked: str, had: str) -> bool:
    """Whether two versions of QAIRT are one; where only three numbers are known of one, these decide."""
    first, second = asked.split("."), had.split(".")
    shared = min(len(first), len(second))
    return first == second if shared > 3 else first[:shared] == second[:shared]
