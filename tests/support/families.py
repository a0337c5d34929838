"""What is known of each model family for tests: `CASES` of every tests/families/test_*.py, found by itself."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np

from estream.models import family
from estream.models.base import Family
from tests import families as folder

Options = dict[str, Any]  # fields of the config, and `tiny_checkpoints.write`'s own

LOGITS = np.log(np.array([[1.0, 4.0, 1.0, 2.0]], np.float32))  # softmax 1/8, 1/2, 1/8, 1/4
TINY = {"num_experts": 4, "num_experts_per_tok": 2}


@dataclass(frozen=True)
class FamilyCases:
    """One family.

    classes: of transformers, config and model. public: config.json of a public checkpoint. tiny: config of the tiny
    random checkpoints, 8 experts. smallest: changes that leave each kind of layer and every tensor once. prefills:
    (changes, prompt length) for the numpy reference. engines: (panel width, changes) for the cpu target. htp: changes
    for the simulator. unsupported, senseless: (changes of `public`, what the error says).
    """

    name: str
    classes: tuple[str, str]
    public: Options
    tiny: Options
    smallest: Options
    prefills: Sequence[tuple[Options, int]]
    engines: Sequence[tuple[int | None, Options]]
    htp: Options
    unsupported: Sequence[tuple[Options, str]] = ()
    senseless: Sequence[tuple[Options, str]] = ()

    def model(self, **changes: Any) -> Family:
        """The public checkpoint's family, with fields changed."""
        return family(self.name).from_config(self.public | changes)


@cache
def found() -> dict[str, FamilyCases]:
    """By model type, sorted."""
    modules = [name for _, name, _ in pkgutil.iter_modules(folder.__path__) if name.startswith("test_")]
    cases = [importlib.import_module(f"{folder.__name__}.{name}").CASES for name in modules]
    return {case.name: case for case in sorted(cases, key=lambda case: case.name)}


def close(actual: np.ndarray | None, expected: Any) -> None:
    """float32 numbers, but for the last bits."""
    assert actual is not None
    assert actual.dtype == np.float32
    np.testing.assert_allclose(actual, np.array(expected, np.float32), rtol=3e-7)
