"""What `estream prefill` prints for people: the plan, the answer, the statistics."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from estream.cli.console import table
from estream.package.reader import Package
from estream.strategies import DEFAULT, STRATEGIES
from estream.units import format_bytes, format_rate, format_seconds, format_tokens

UNMEASURED = "not measured"


def plan(package: Package, tokens: int, configuration: Mapping[str, Any]) -> str:
    """What is about to be done, before it is done. `configuration`: the engine's, everything resolved."""
    arch, pool = package.architecture, package.pool
    model = (
        f"{arch.family}, {len(arch.layers)} layers, {arch.experts} experts ({arch.top_k} per token), "
        f"experts {configuration['experts']}, dense {configuration['dense']}"
    )
    threads = configuration["threads"]
    target = f"{configuration['backend']} ({configuration['graphs']} graphs" + (
        f", {threads} threads)" if threads else ")"
    )
    rows = [("model", model), ("prompt", format_tokens(tokens)), ("target", target)]
    if configuration["strategy"] != DEFAULT:
        rows.append(("strategy", f"{configuration['strategy']}: {STRATEGIES[configuration['strategy']].summary}"))
    dense = sum(tensor.nbytes for tensor in package.dense.values() if tensor.name != "embed")
    if configuration["dense_weights"] == "paged":
        rows.append(
            ("dense", f"{format_bytes(configuration['dense_bytes'])} for {format_bytes(dense)}: layer by layer")
        )
    else:
        rows.append(("resident", f"{format_bytes(dense)} of dense weights"))
    if configuration["resident"] == "all":
        rows.append(("", f"{format_bytes(pool.pool_bytes)} of experts: all of them"))
    else:
        group, banks, lanes = (configuration[name] for name in ("group", "banks", "lanes"))
        rows.append(
            ("arena", f"{format_bytes(configuration['arena_bytes'])} for {format_bytes(pool.pool_bytes)} of experts")
        )
        if configuration["pinned"]:
            kept = f"first {configuration['pinned']} group(s) of each layer, once they were read"
            rows.append(("pinned", f"{format_bytes(configuration['pinned_bytes'])}: the {kept}"))
        rows.append(("paging", f"G={group} B={banks} Q={lanes}, prefetch {configuration['prefetch']}"))
    if configuration["memory"] is not None:
        rows.append(("budget", format_bytes(configuration["memory"])))
    rows.append(("flash", "direct I/O" if configuration["direct_io"] else "buffered reads, through the page cache"))
    return table(rows)


def next_tokens(logits: np.ndarray, top: int, previous: int, tokenizer: Any | None) -> list[dict[str, Any]]:
    """The `top` most probable next tokens; equal logits in the order of their ids.

    logits: float32 [V]; previous: the prompt's last id. Returns id, text (None without a tokenizer), logit and
    probability (softmax over V, in float64).
    """
    wide = logits.astype(np.float64)
    weights = np.exp(wide - wide.max())
    probability = weights / weights.sum()
    best = np.argsort(-wide, kind="stable")[:top]
    return [
        {
            "id": int(token),
            "text": None if tokenizer is None else _text(tokenizer, previous, int(token)),
            "logit": float(logits[token]),
            "probability": float(probability[token]),
        }
        for token in best
    ]


def _text(tokenizer: Any, previous: int, token: int) -> str:
    """A token's text where it stands: some decoders drop a space that begins the text."""
    before, both = tokenizer.decode([previous]), tokenizer.decode([previous, token])
    return str(both[len(before) :] if both.startswith(before) else tokenizer.decode([token]))


def answer(following: list[dict[str, Any]]) -> str:
    """One line per next token: id, text, logit, probability."""
    rows = ["    id      logit  probability  text"]
    for token in following:
        text = "" if token["text"] is None else repr(token["text"])
        rows.append(f"{token['id']:>6} {token['logit']:>10.4f} {100 * token['probability']:>10.2f} %  {text}".rstrip())
    return "\n".join(rows)


def statistics(stats: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    """One line each for time, flash and memory; and for what was dropped, where the strategy is not exact."""
    memory = stats["memory"]
    parts = ", ".join(
        f"{word} {_seconds(stats[key])}"
        for word, key in (
            ("attention", "attention_s"),
            ("router", "router_s"),
            ("experts", "dispatch_s"),
            ("wait for flash", "flash_wait_s"),
        )
    )
    time = f"{_seconds(stats['ttft_s'])} to the logits ({parts}; bubble {_percent(stats['bubble_rate'])})"
    flash = (
        f"{_bytes(stats['bytes_read'])} of experts at {_rate(stats)}, {_count(stats['records_read'])} records read, "
        f"{_count(stats['records_needed'])} needed, {_count(stats['groups_skipped'])} groups skipped, "
        f"{_direct(stats)}"
    )
    held = (
        f"peak {_bytes(memory['peak_bytes'])} (arena {_bytes(memory['arena_bytes'])}, "
        f"resident weights {_bytes(memory['resident_weight_bytes'])}"
        + (f", shared with the NPU {_bytes(memory['shared_bytes'])}" if memory["shared_bytes"] else "")
        + ")"
        + (f"; copied by the NPU's driver {_bytes(stats['npu_bytes_copied'])}" if stats["npu_bytes_copied"] else "")
    )
    rows = [("time", f"{time}; load {_seconds(stats['load_s'])}"), ("flash", flash), ("memory", held)]
    if not STRATEGIES[configuration["strategy"]].exact:
        rows.append(("dropped", _dropped(stats, configuration)))
    return table(rows)


def _dropped(stats: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    rate, computed, useful = stats["dropped_rate"], stats["rows_computed"], stats["rows_useful"]
    cold = configuration["cold_experts"]
    tiers = ", ".join(map(str, configuration["tier_rows"])) or "none"
    return (
        f"{UNMEASURED if rate is None else f'{100 * rate:.3g} %'} of (token, expert) pairs; "
        f"tiers {tiers} (rows of {format_tokens(configuration['tier_window'])}); "
        f"{cold} of {cold + sum(configuration['tier_experts'])} experts cold; "
        f"rows computed/useful {f'{computed / useful:.2f}' if computed is not None and useful else UNMEASURED}"
    )


def simulated(soc: object, rows: str = "") -> str:
    """What an answer of the simulator is, and what it is not. rows: which ones it concerns."""
    return f"simulated{rows}: numbers are those of the HTP of {soc}, times are not"


def everything(stats: Mapping[str, Any], configuration: Mapping[str, Any]) -> str:
    """--verbose: every statistic and every resolved option, one per line."""
    flat = {key: value for key, value in stats.items() if not isinstance(value, Mapping)}
    for key, value in stats.items():
        if isinstance(value, Mapping):
            flat |= {f"{key}.{inner}": item for inner, item in value.items()}
    if flat["direct_io_reason"] is None:
        del flat["direct_io_reason"]  # nothing to explain, which is not the same as not measured
    rows = [(key, UNMEASURED if value is None else str(value)) for key, value in flat.items()]
    rows += [(f"configuration.{key}", str(value)) for key, value in configuration.items()]
    return table(rows)


def _seconds(value: float | None) -> str:
    return UNMEASURED if value is None else format_seconds(value)


def _bytes(value: float | None) -> str:
    return UNMEASURED if value is None else format_bytes(value)


def _rate(stats: Mapping[str, Any]) -> str:
    """Bytes over the time in which a read was outstanding."""
    nbytes, seconds = stats["bytes_read"], stats["flash_busy_s"]
    return UNMEASURED if nbytes is None or not seconds else format_rate(nbytes / seconds)


def _count(value: int | None) -> str:
    return UNMEASURED if value is None else str(value)


def _percent(value: float | None) -> str:
    return UNMEASURED if value is None else f"{100 * value:.1f} %"


def _direct(stats: Mapping[str, Any]) -> str:
    reason = stats["direct_io_reason"]
    if stats["direct_io"]:
        return "direct I/O" + (f" {reason}" if reason else "")
    return "buffered reads" + (f" ({reason})" if reason else "")


def device(facts: Mapping[str, Any]) -> str:
    """The phone that ran it, and how warm it was."""
    zones = [(facts["temperature"] or {}).get(when) for when in ("before", "after")]
    warm = " to ".join(f"{zone['celsius']:.1f} °C ({zone['zone']})" for zone in zones if zone) or "unknown"
    said = f"{facts['serial']}, EStream {facts['estream']}, ONNX Runtime {facts['onnxruntime']}, {facts['machine']}"
    return table([("device", f"{said}; temperature {warm}")])
