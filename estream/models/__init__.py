"""Model families. A family is a file of this folder that defines a `Family`; it is found by itself.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import importlib
import inspect
import pkgutil
from functools import cache

from estream.errors import UnsupportedModelError, brief
from estream.models.base import Family


@cache
def _found() -> dict[str, type[Family]]:
    found: dict[str, type[Family]] = {}
    for entry in pkgutil.iter_modules(__path__):
        module = importlib.import_module(f"{__name__}.{entry.name}")
        for value in vars(module).values():
            defined_here = inspect.isclass(value) and value.__module__ == module.__name__
            if defined_here and issubclass(value, Family) and not inspect.isabstract(value):
                if value.name in found:
                    raise RuntimeError(f"two families are named {value.name!r}: {found[value.name]} and {value}")
                found[value.name] = value
    return found


def families() -> tuple[str, ...]:
    """The model types (model_type in config.json) that EStream knows, sorted."""
    return tuple(sorted(_found()))


def family(model_type: str) -> type[Family]:
    """The family of a model type. Raises UnsupportedModelError, which lists the known ones."""
    if model_type not in _found():
        raise UnsupportedModelError(
            "unknown model_type", asked=brief(model_type), had=", ".join(families()), next_step="Pack one of these"
        )
    return _found()[model_type]
