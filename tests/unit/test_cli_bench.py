"""What `bench` prints of what was measured. Nothing is measured here."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from estream.cli.bench import Cell, report
from estream.strategies import find_strategy


def measured(folder: Path, name: str, tokens: int, **configuration: Any) -> Cell:
    cell, file = Cell(find_strategy(name), tokens), folder / "logits.npy"
    np.save(file, np.zeros(3, np.float32))
    keys = ("bubble_rate", "bytes_read", "rows_computed", "rows_useful", "dropped_rate")
    stats = dict.fromkeys(keys, 0) | {"ttft_s": 2.0, "memory": {"peak_bytes": 1 << 20}}
    cell.add({"stats": stats, "configuration": configuration, "first_ttft_s": 3.0}, file)
    return cell


def refused(name: str, tokens: int, why: str) -> Cell:
    cell = Cell(find_strategy(name), tokens)
    cell.add({"refused": why, "usage": True}, Path("none"))
    return cell


def test_rows_of_the_simulator_are_named(tmp_path: Path) -> None:
    there: dict[str, Any] = {"simulated": True, "soc": "sm8650"}
    cells = [measured(tmp_path, name, tokens, **there) for tokens in (8, 16) for name in ("estream", "padded")]
    cells.append(measured(tmp_path, "cpu-only", 8))
    assert report(cells).splitlines()[-1] == (
        "simulated (estream, padded): numbers are those of the HTP of sm8650, times are not"
    )
    assert "simulated" not in report(cells[-1:])


def test_equal_refusals_are_told_once() -> None:
    cells = [refused("resident", 8, "no room"), refused("padded", 8, "no room"), refused("resident", 16, "no room")]
    cells.append(refused("resident", 32, "less room"))
    assert report(cells).splitlines()[-3:] == [
        "resident, 8, 16 tokens: no room",
        "padded, 8 tokens: no room",
        "resident, 32 tokens: less room",
    ]
