"""The configuration used where the user leaves it open, from arithmetic on the package; no measurements."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import NamedTuple

from estream.errors import MemoryBudgetError, UsageError
from estream.models.base import Architecture
from estream.package.layout import PoolLayout, align
from estream.solver.load import expected_coverage
from estream.units import parse_size

PREFETCH_MODES = ("auto", "before-routing", "after-routing", "on-demand")
RESIDENT_MODES = ("none", "all")
DENSE_MODES = ("auto", "resident", "paged")
GROUP_BYTES = 16 << 20  # at least: large reads reach the device's rate; small groups free their bank sooner
ARENA_BYTES = 256 << 20  # flash fills only free banks while attention runs
LANES = 2
_UNPINNED = 32 << 20  # of a budget: automatic pinning leaves it to what a process allocates later


@dataclass(frozen=True)
class Configuration:
    """Everything resolved: G, B, Q, prefetch mode, resident set, where dense weights are, and the bytes they stand for.

    dense_weights: "resident" or "paged"; dense_bytes: matrices and records, or the slots that they are read into.
    pinned: groups of every layer that stay once they were read; pinned_bytes: of all of them, beside the arena."""

    group: int
    banks: int
    lanes: int
    prefetch: str
    resident: str
    bank_bytes: int
    arena_bytes: int
    dense_weights: str = "resident"
    dense_bytes: int = 0
    pinned: int = 0
    pinned_bytes: int = 0

    def to_dict(self) -> dict[str, object]:
        return asdict(self)


COVERED = 0.99  # share of a layer's experts that a prompt is expected to need: with fewer, reads wait for the routes


def prefetch_for(prefetch: str, experts: int, top_k: int, tokens: int) -> str:
    """The mode of one prefill; "auto": a short prompt reads only what it was routed to, a long one reads ahead."""
    if prefetch != "auto":
        return prefetch
    return "before-routing" if expected_coverage(experts, top_k, tokens) >= COVERED else "after-routing"


def resolve(
    pool: PoolLayout,
    *,
    group: int | None = None,
    banks: int | None = None,
    lanes: int | None = None,
    prefetch: str = "auto",
    resident: str = "none",
    dense: str = "auto",
    pinned: int | None = None,
    strategy: str | None = None,
    memory: int | None = None,
    held: int = 0,
    dense_bytes: tuple[int, int] = (0, 0),
) -> Configuration:
    """Fills in what is None or "auto". `memory`: budget of the whole process in bytes; `held`: what everything but the
    arena and the dense weights of `dense_bytes` needs; `dense_bytes`: of these when resident, and when paged. "auto"
    pages them only where they leave no room in the budget. `pinned`: groups of every layer, clipped to a layer's; None:
    as many as the budget has room for beside the arena, none without a budget. `strategy`: the one that
    fixes group or residency, for the refusal.

    Raises UsageError for values that cannot be meant, MemoryBudgetError naming the smallest workable budget."""
    for name, value in (("group", group), ("banks", banks), ("lanes", lanes)):
        # type(), not isinstance: True is no number of banks
        if value is not None and (type(value) is not int or value < 1):
            raise UsageError(f"--{name} must be a whole number of at least 1", asked=repr(value))
    if pinned is not None and (type(pinned) is not int or pinned < 0):
        raise UsageError("--pinned must be a whole number of at least 0", asked=repr(pinned))
    if pinned and resident == "all":
        raise UsageError("--pinned and --resident all exclude each other", asked=pinned, next_step="Leave one out")
    if lanes is not None and lanes > 64:
        raise UsageError("--lanes must be at most 64", asked=lanes)
    if prefetch not in PREFETCH_MODES:
        raise UsageError("unknown prefetch mode", asked=prefetch, had=", ".join(PREFETCH_MODES))
    if resident not in RESIDENT_MODES:
        raise UsageError("unknown resident mode", asked=resident, had=", ".join(RESIDENT_MODES))
    if dense not in DENSE_MODES:
        raise UsageError("unknown mode of dense weights", asked=dense, had=", ".join(DENSE_MODES))
    sizes = dict(zip(("resident", "paged"), dense_bytes, strict=True))
    modes = [dense] if dense != "auto" else ["resident"] if memory is None else ["resident", "paged"]
    for mode in modes:
        available = None if memory is None else memory - held - sizes[mode]
        fits = _fit(pool, group, banks, available, resident, pinned)
        if fits is not None:
            return Configuration(
                group=fits.group,
                banks=fits.banks,
                lanes=lanes or LANES,
                prefetch=prefetch,
                resident=resident,
                bank_bytes=fits.bank_bytes,
                arena_bytes=fits.banks * fits.bank_bytes,
                dense_weights=mode,
                dense_bytes=sizes[mode],
                pinned=fits.pinned,
                pinned_bytes=fits.pinned_bytes,
            )
    assert memory is not None, "without a budget everything fits"
    least_mode = min(sizes, key=lambda mode: sizes[mode])  # resident, where both need the same
    least = held + sizes[least_mode]
    # What was chosen against the smallest: everything that was left open follows from the budget.
    other = "" if dense in ("auto", least_mode) else f" --dense {least_mode}"
    if resident == "all":
        step = f"Use --resident none, or --memory {least + pool.pool_bytes}{other}"
        if strategy is not None:
            step = f"The smallest budget of --strategy {strategy} is --memory {least + pool.pool_bytes}{other}"
        raise MemoryBudgetError(
            "the memory budget cannot hold all experts",
            asked=f"{memory} bytes",
            had=f"a need of {held + sizes[modes[-1]] + pool.pool_bytes}",
            next_step=step,
        )
    # What was asked for, as far as it was: the automatic choice is one bank of one panel at the least.
    count, size = banks or 1, min(group or 1, pool.panels_per_layer) * pool.panel.panel_bytes
    room = memory - held - sizes[modes[-1]]
    beside = f" beside {pinned} pinned group(s) of every layer" if pinned else ""
    chosen = ((group or 1) > 1, " --group 1"), ((banks or 1) > 1, " --banks 1"), (True, other), (pinned, " --pinned 0")
    others = "".join(option for against, option in chosen if against)
    smallest = f"The smallest budget that works is --memory {least + pool.panel.panel_bytes}"
    smallest += f" with{others}" if others else ""
    if strategy is not None:
        count = min(count, pool.pool_bytes // size)
        smallest = f"The smallest budget of --strategy {strategy} is --memory {least + count * size}{other}"
    raise MemoryBudgetError(
        f"the memory budget leaves no room for {count} bank(s) of {size} bytes{beside}",
        asked=f"{memory} bytes",
        had=f"{max(room, 0)} after weights, activations and run time ({memory - room})",
        next_step=smallest,
    )


class _Fit(NamedTuple):
    group: int
    banks: int
    bank_bytes: int
    pinned: int
    pinned_bytes: int


def _fit(
    pool: PoolLayout, group: int | None, banks: int | None, available: int | None, resident: str, pinned: int | None
) -> _Fit | None:
    """What is used of `available` bytes, or None where nothing fits."""
    if resident == "all":
        return _Fit(1, 0, 0, 0, 0) if available is None or available >= pool.pool_bytes else None
    panel, layers = pool.panel.panel_bytes, len(pool.moe_layers)
    arena = ARENA_BYTES if available is None else min(ARENA_BYTES, available)
    # Two groups in flight are the least that can overlap; one is the least that can work. Pinned ones grow with G, too.
    most = arena // 2
    if available is not None:
        most = min(most, available // (max(2, banks or 0) + (pinned or 0) * layers))
    # Not below GROUP_BYTES for the sake of whole panels: a smaller read is a slower one.
    group = min(group or max(1, min(-(-GROUP_BYTES // panel), most // panel)), pool.panels_per_layer)
    bank, per_layer = group * panel, -(-pool.panels_per_layer // group)
    if pinned is None:
        beside = 0 if available is None else available - _UNPINNED - (banks * bank if banks else max(arena, bank))
        pinned = max(0, beside) // (layers * bank) if layers else 0
    pinned = min(pinned, per_layer)
    pinned_bytes = layers * panel * min(pinned * group, pool.panels_per_layer)
    if available is not None:
        arena = min(ARENA_BYTES, available - pinned_bytes)
    banks = min(banks or max(1, arena // bank), max((per_layer - pinned) * layers, 1))
    if available is not None and banks * bank + pinned_bytes > available:
        return None
    return _Fit(group, banks, bank, pinned, pinned_bytes)


def budget_bytes(memory: int | str | None) -> int | None:
    """A memory budget in bytes, from bytes or '1.5GiB'. Raises UsageError for what is neither."""
    if isinstance(memory, str):
        return parse_size(memory)
    if memory is not None and (type(memory) is not int or memory < 1):
        raise UsageError("--memory must be bytes or a size like 1.5GiB", asked=repr(memory))
    return memory


_STEADY = 4 << 20
SCRATCH_BYTES = 64 << 20  # graphs' own intermediate tensors apart from attention scores, allocator slack


def held_bytes(now: int, state: int, scratch: int, arch: Architecture, max_tokens: int) -> int:
    """Bytes that the process needs beside the arena. now: held already (run time, dense weights); state: reserved for
    activations and not yet touched; scratch: the attention graph's own."""
    embedded = 8 * arch.hidden * max_tokens  # the rows as read, and in float32
    now = align(now, _STEADY)  # what the run time holds is never quite the same: budgets must mean the same next time
    return now + state + scratch + embedded + SCRATCH_BYTES
