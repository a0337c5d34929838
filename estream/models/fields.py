"""Values of config.json as the types that a family's dataclass says.

Run-time part: numpy and the standard library only.
"""

from __future__ import annotations

import sys
import types
import typing
from typing import Any

from estream.errors import CheckpointError, brief


def typed(name: str, value: Any, hint: Any) -> Any:
    """`value` as the type `hint`: int, float, bool, str, tuple[X, ...], or one of them | None. Raises CheckpointError
    naming the field."""
    options = typing.get_args(hint) if isinstance(hint, types.UnionType) else (hint,)
    for option in options:
        if option is types.NoneType and value is None:
            return None
        if option is float and type(value) in (int, float) and abs(value) <= sys.float_info.max:  # not NaN, not 10**400
            return float(value)
        if typing.get_origin(option) is tuple and isinstance(value, (list, tuple)):
            return tuple(typed(name, item, typing.get_args(option)[0]) for item in value)
        if option in (int, bool, str) and type(value) is option:  # a bool is no int here
            return value
    wanted = getattr(hint, "__name__", str(hint)) if not isinstance(hint, types.UnionType) else str(hint)
    raise CheckpointError(f"config.json: {name}", asked=wanted, had=brief(value))
