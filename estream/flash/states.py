"""The words of the flash part: bank states, loads, reads, counters, and the groups that the compute gets."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from estream.runtime.target import Buffer


class BankState(Enum):
    AVAILABLE = "Available"
    FILLING = "Filling"
    READY = "Ready"
    IN_USE = "InUse"


class Answer(Enum):
    """What `acquire` says when it does not hand out a group."""

    WAIT = "wait"  # the layer's next group is not Ready yet: ask again after the next event
    STARVED = "starved"  # the compute holds every bank that it may: it must release a group first
    DONE = "done"  # the layer has no further needed group


@dataclass
class Counters:
    """One prefill's figures. Panels and bytes are those of experts.safetensors; seconds are the stream's clock."""

    bytes_read: int = 0
    panels_read: int = 0  # of groups that were started; a group dropped half-way counts whole
    panels_needed: int = 0
    groups_skipped: int = 0  # never started, because no token was routed to them
    groups_dropped: int = 0  # started before routing was known, then not needed
    reads: int = 0
    wait_s: float = 0.0  # the compute waited for a group
    busy_s: float = 0.0  # at least one read was outstanding


@dataclass(eq=False, slots=True)
class Load:
    """A group in a bank. `read`: the panels its reads bring; panel p lies at (p - first) * panel_bytes of the bank."""

    layer: int
    index: int  # of the group in its layer
    first: int  # the group's first panel
    bank: int
    read: tuple[int, ...]
    needed: tuple[int, ...] | None  # None until the layer's routes are known
    pending: deque[Read] = field(default_factory=deque)
    outstanding: int = 0  # reads handed out, plus the check
    dropped: bool = False


@dataclass(frozen=True, eq=False, slots=True)
class Read:
    """One stripe: `nbytes` from `offset` of the pool file to `bank_offset` of its bank; all multiples of 16 KiB."""

    load: Load
    bank_offset: int
    offset: int
    nbytes: int


@dataclass(frozen=True)
class ReadyGroup:
    """A group in memory. `panels`: (expert * panels_per_expert + p, its bytes), ascending, only those with tokens.

    The bytes may be used until `release()`, to be called once, after the last dispatch that uses them has returned.
    """

    layer: int
    group: int  # its index in the layer
    bank: int
    panels: tuple[tuple[int, Buffer], ...]
    release: Callable[[], None]
