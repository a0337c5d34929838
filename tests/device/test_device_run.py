"""`estream device run`, `calibrate` and `bench` with the real adb client and the real program in an emulated phone."""

from __future__ import annotations

import json
import re
from pathlib import Path

import numpy as np

from android.client import CABLE
from tests.device.cli import Said
from tests.device.ready import HOSTILE, LAYOUT, NO_NPU, Ready
from tests.support.faults import IDS, logits_of, make_package

PROMPT = ("--ids", " ".join(map(str, IDS)))
CPU = ("--backend", "cpu", "--threads", "1")


def error(said: Said) -> tuple[int, str]:
    """Exit status and the line of the error."""
    (line,) = [line for line in said.err.splitlines() if line.startswith("estream: error: ")]
    assert "Traceback" not in said.err
    return said.status, line.removeprefix("estream: error: ")


def test_a_run_is_the_hosts_prefill(ready: Ready, tmp_path: Path) -> None:
    paths = {
        name: tmp_path / f"{name} $(id).{end}"
        for name, end in (("logits", "npy"), ("hidden", "npy"), ("trace", "json"))
    }
    outputs = [word for name, path in paths.items() for word in (f"--{name}", path)]

    there = ready.estream("run", ready.package, *PROMPT, *CPU, *outputs, "--json")
    here = ready.estream.here("prefill", ready.package, *PROMPT, *CPU, "--json")

    assert (there.status, here.status) == (0, 0)
    logits, expected = np.load(paths["logits"]), logits_of(ready.package)
    assert logits.dtype == np.float32 and logits.shape == expected.shape
    assert np.abs(logits - expected).max() <= 1e-4 * np.ptp(expected)
    assert np.load(paths["hidden"]).shape[0] == len(IDS)
    names = " ".join(event["name"] for event in json.loads(paths["trace"].read_text())["traceEvents"])
    assert "attention" in names and "group 0" in names
    assert there.json.keys() - {"device", "crossover"} == here.json.keys()
    assert there.json["stats"].keys() == here.json["stats"].keys()
    assert there.json["configuration"] == here.json["configuration"]
    assert [one["id"] for one in there.json["next"]] == [one["id"] for one in here.json["next"]]
    assert there.json["device"]["machine"] == "aarch64"
    assert not list(ready.phone.path(LAYOUT.runs).iterdir())
    assert any(ready.phone.path(LAYOUT.bytecode).rglob("engine*.pyc"))
    assert not list(ready.phone.path(LAYOUT.app).rglob("*.pyc"))
    ready.wait_for_silence()


def test_the_report_is_that_of_prefill(ready: Ready) -> None:
    there = ready.estream("run", ready.package, *PROMPT, *CPU, "--keep")
    here = ready.estream.here("prefill", ready.package, *PROMPT, *CPU)

    def labels(said: Said) -> list[str]:
        return [line.split()[0] for line in said.out.splitlines()]

    assert labels(there) == [*labels(here), "device", "kept"]
    (kept,) = ready.phone.path(LAYOUT.runs).iterdir()
    assert sorted(path.name for path in kept.iterdir()) == ["logits.npy", "result.json"]
    assert ready.estream("clean", "--runs").status == 0


def test_an_error_crosses_as_it_was_raised(ready: Ready) -> None:
    arguments = (ready.package, *PROMPT, *CPU, "--memory", "200KiB")

    status, there = error(ready.estream("run", *arguments))
    expected, here = error(ready.estream.here("prefill", *arguments))

    assert (status, re.sub(r"\d+", "N", there)) == (expected, re.sub(r"\d+", "N", here))
    assert "the memory budget leaves no room" in there and "The smallest budget that works is --memory" in there
    ready.wait_for_silence()


def test_a_prompt_that_is_too_long_never_reaches_the_phone(ready: Ready) -> None:
    long = ("--ids", " ".join(["1"] * 5000))
    ready.phone.clear_log()

    there = error(ready.estream("run", ready.package, *long, *CPU))

    assert there == error(ready.estream.here("prefill", ready.package, *long, *CPU))
    assert ready.phone.log() == []


def test_a_package_that_was_not_pushed_or_packed_again(ready: Ready, tmp_path: Path) -> None:
    absent = make_package(tmp_path)
    other = make_package(tmp_path / "other", seed=1).rename(tmp_path / "other" / HOSTILE)

    status, line = error(ready.estream("run", absent, *PROMPT, *CPU))
    assert status == 1 and line.startswith(f"{absent.name} is not on the phone") and "estream device push" in line
    status, line = error(ready.estream("run", other, *PROMPT, *CPU))
    assert status == 1 and "on the phone is not the host's" in line


def test_no_npu(ready: Ready) -> None:
    said = ready.estream("run", ready.package, *PROMPT, "--backend", "htp")

    assert error(said) == (1, NO_NPU)
    ready.wait_for_silence()


def test_ctrl_c_ends_the_phones_program(ready: Ready) -> None:
    with ready.estream.running("bench", ready.package, *CPU, "--tokens", "4", "--rounds", "100000") as bench:
        bench.wait_for(lambda: "paging" in bench.said())
        assert ["estream_phone.py bench" in line for line in ready.phone.processes()].count(True)
        bench.interrupt()
        said = bench.finish()

    assert said.status == 130
    assert said.err.endswith("estream: interrupted\n") and "Traceback" not in said.err
    ready.wait_for_silence()


def test_a_daemon_that_dies_in_the_middle(ready: Ready) -> None:
    with ready.estream.running("bench", ready.package, *CPU, "--tokens", "4", "--rounds", "100000") as bench:
        bench.wait_for(lambda: "paging" in bench.said())
        ready.phone.kill_daemon()
        status, line = error(bench.finish())

    try:
        assert (status, line) == (1, f"the phone's program: the connection to {ready.phone.serial} broke. {CABLE}")
        ready.wait_for_silence()
    finally:
        ready.phone.start_daemon()
        ready.estream.adb.connect(ready.phone)


def test_calibrate_measures_for_plan(ready: Ready, tmp_path: Path) -> None:
    profile = tmp_path / "phone.json"

    measured = ready.estream("calibrate", ready.package, *CPU, "--out", profile)
    plan = ready.estream.here("plan", ready.package, "--tokens", "64", "--profile", profile, "--json")

    assert measured.status == 0 and f"measured on {ready.phone.serial}" in measured.out
    assert plan.status == 0, plan.err
    assert json.loads(profile.read_text())["machine"]["processor"] == "aarch64"
    assert plan.json["ttft_s"] > 0
    ready.wait_for_silence()


def test_bench_prints_a_table(ready: Ready) -> None:
    said = ready.estream("bench", ready.package, *CPU, "--tokens", "4,16", "--rounds", "2")

    assert said.status == 0
    head = said.out.splitlines().index(
        next(line for line in said.out.splitlines() if line.split()[:2] == ["tokens", "median"])
    )
    assert [line.split()[0] for line in said.out.splitlines()[head + 1 : head + 3]] == ["4", "16"]
    assert said.out.endswith(f"medians of 2 rounds on {ready.phone.serial}\n")
    ready.wait_for_silence()
