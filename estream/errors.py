"""Every error that EStream raises on purpose.

An error names the thing, what was asked, what was had, and the next step. `exit_status` is what the command line
returns: 2 for a mistake in how EStream was called, 1 for everything else.

Messages quote names and values that strangers wrote: they are cut to a readable length and hold no control characters.
"""

from __future__ import annotations

import reprlib

_LONGEST = 2000  # characters of one part of a message


class EStreamError(Exception):
    """Base class. `str(error)` is one readable message; the parts stay available as attributes."""

    exit_status = 1
    usual_step: str | None = None  # the next step where the raiser knows no better one

    def __init__(self, thing: str, *, asked: object = None, had: object = None, next_step: str | None = None) -> None:
        self.thing = thing
        self.asked = asked
        self.had = had
        self.next_step = next_step or self.usual_step
        super().__init__(self._message())

    def _message(self) -> str:
        told = (("asked", self.asked), ("had", self.had))
        facts = [f"{word} {_readable(str(value))}" for word, value in told if value is not None]
        message = _readable(self.thing) + (f" ({', '.join(facts)})" if facts else "")
        return f"{message}. {self.next_step}" if self.next_step else message


def brief(value: object) -> str:
    """`repr` of a value from a stranger's file, cut short however long or deeply nested it is."""
    return _BRIEF.repr(value)


_BRIEF = reprlib.Repr()
_BRIEF.maxlevel, _BRIEF.maxlist, _BRIEF.maxdict = 3, 16, 8
_BRIEF.maxstring = _BRIEF.maxlong = _BRIEF.maxother = 200


def _readable(text: str) -> str:
    if len(text) > _LONGEST:
        text = f"{text[:_LONGEST]}... ({len(text)} characters)"
    if text.isprintable():
        return text
    return "".join(sign if sign.isprintable() else sign.encode("unicode_escape").decode("ascii") for sign in text)


class UsageError(EStreamError):
    """An option or an argument that cannot be meant."""

    exit_status = 2


class CheckpointError(EStreamError):
    """A Hugging Face checkpoint that cannot be read: files, shards, dtypes, shapes, names."""

    usual_step = "Check the file, or download the checkpoint again"


class UnsupportedModelError(CheckpointError):
    """A checkpoint whose arithmetic EStream does not know: family, activation, rope type, quantisation."""

    usual_step = "Give a checkpoint that asks for supported arithmetic only"


class PackageError(EStreamError):
    """A packed model that is missing, incomplete, of another version, or damaged."""

    usual_step = "Check the package with estream verify, or pack the checkpoint again"


class FlashError(EStreamError):
    """Reading expert records failed: I/O error, short read, checksum."""


class TargetError(EStreamError):
    """The target refused a graph, a binding, an allocation or a run."""


class MemoryBudgetError(EStreamError):
    """The work does not fit the memory budget; the message names the smallest budget that works."""


class PromptError(EStreamError):
    """Token ids that cannot be prefilled: empty, out of range, longer than the context."""


class NumericError(EStreamError):
    """Activations left the finite range; the message names the layer and the token."""


class ClosedError(EStreamError):
    """The engine was closed."""
