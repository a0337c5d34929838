"""Hostile config.json files where a user meets them: `estream pack`, `estream inspect`, `estream.pack`."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from estream.cli.main import main
from estream.errors import CheckpointError, UnsupportedModelError
from estream.models import families
from tests.support.refusals import checkpoint_refused
from tests.support.tiny_packages import OLMOE, write_checkpoint


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    write_checkpoint(tmp_path / "in", OLMOE)
    return tmp_path / "in"


def _pipe(file: Path) -> None:
    file.unlink()
    os.mkfifo(file)


def _endless(file: Path) -> None:
    file.unlink()
    file.symlink_to("/dev/zero")


def _set(**fields: Any) -> Callable[[Path], Any]:
    return lambda file: file.write_text(json.dumps(OLMOE | fields))


KNOWN = ", ".join(families())
CONFIGS: dict[str, tuple[Callable[[Path], Any], list[str], type[CheckpointError]]] = {
    "not JSON": (lambda file: file.write_text("{'a': 1}"), ["config.json: is not JSON"], CheckpointError),
    "not an object": (lambda file: file.write_text("[]"), ["is not a JSON object (had list)"], CheckpointError),
    "nested deep": (lambda file: file.write_text("[" * 10**6), ["config.json: is not JSON"], CheckpointError),
    "name twice": (lambda file: file.write_text('{"a": 1, "a": 2}'), ["appears twice"], CheckpointError),
    "top-k": (_set(num_experts_per_tok=4), ["num_experts_per_tok", "at most 3 experts", "had 4"], CheckpointError),
    "activation": (_set(hidden_act="gelu"), ["hidden_act", "'silu'", "'gelu'"], UnsupportedModelError),
    "rope": (_set(rope_scaling={"type": "dynamic", "factor": 2}), ["rope_scaling", "'dynamic'"], UnsupportedModelError),
    "model type": (_set(model_type="llama"), ["unknown model_type", "'llama'", KNOWN], UnsupportedModelError),
    "no model type": (_set(model_type=None), ["has no model_type", KNOWN], CheckpointError),
    "quantised": (
        _set(quantization_config={"quant_method": "gptq", "bits": 4}),
        ["quantization_config", "'gptq'", "Pack the original"],
        UnsupportedModelError,
    ),
    "unknown field": (_set(logit_scale=2), ["logit_scale", "may change the arithmetic"], UnsupportedModelError),
    "number without end": (_set(rope_theta=10**400), ["rope_theta"], CheckpointError),
    "NaN": (_set(rms_norm_eps=float("nan")), ["rms_norm_eps"], CheckpointError),
    "two thousand million experts": (_set(num_experts=2 * 10**9), ["number of experts", "at most"], CheckpointError),
    "many layers and experts": (
        _set(num_hidden_layers=4096, num_experts=4096),
        ["1000 or more missing"],
        CheckpointError,
    ),
    "a very long word": (_set(hidden_act="x" * 10**6), ["hidden_act"], UnsupportedModelError),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_configs(folder: Path, capsys: pytest.CaptureFixture[str], case: str) -> None:
    damage, words, error = CONFIGS[case]
    damage(folder / "config.json")
    checkpoint_refused(capsys, folder, words, error)


@pytest.mark.parametrize(
    ("damage", "words"),
    [
        (lambda file: file.unlink(), ["config.json: cannot be read: No such file"]),
        (_pipe, ["config.json: cannot be read: is not a regular file"]),
        (_endless, ["config.json: cannot be read: is not a regular file"]),
    ],
    ids=["missing", "a pipe", "a device"],
)
def test_config_that_cannot_be_read(
    folder: Path, capsys: pytest.CaptureFixture[str], damage: Callable[[Path], Any], words: list[str]
) -> None:
    damage(folder / "config.json")
    checkpoint_refused(capsys, folder, words, CheckpointError, inspect=False)
    assert main(["inspect", str(folder)]) == 2  # without config.json it is neither a package nor a checkpoint
    assert "neither a packed model nor a checkpoint" in capsys.readouterr().err
