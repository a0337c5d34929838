"""Every error that EStream raises on purpose.

An error names the thing, what was asked, what was had, and the next step. `exit_status` is what the command line
returns: 2 for a mistake in how EStream was called, 1 for everything else.
"""


class EStreamError(Exception):
    """Base class. `str(error)` is one readable message; the parts stay available as attributes."""

    exit_status = 1

    def __init__(self, thing: str, *, asked: object = None, had: object = None, next_step: str | None = None) -> None:
        self.thing = thing
        self.asked = asked
        self.had = had
        self.next_step = next_step
        super().__init__(self._message())

    def _message(self) -> str:
        facts = [f"{word} {value}" for word, value in (("asked", self.asked), ("had", self.had)) if value is not None]
        message = self.thing + (f" ({', '.join(facts)})" if facts else "")
        return f"{message}. {self.next_step}" if self.next_step else message


class UsageError(EStreamError):
    """An option or an argument that cannot be meant."""

    exit_status = 2


class CheckpointError(EStreamError):
    """A Hugging Face checkpoint that cannot be read: files, shards, dtypes, shapes, names."""


class UnsupportedModelError(CheckpointError):
    """A checkpoint whose arithmetic EStream does not know: family, activation, rope type, quantisation."""


class PackageError(EStreamError):
    """A packed model that is missing, incomplete, of another version, or damaged."""


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
