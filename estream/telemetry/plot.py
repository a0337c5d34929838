"""Timelines of a prefill as SVG: one row per track, time from left to right. For measured traces and for plans."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape

from estream.flash.virtual import Timeline
from estream.telemetry.trace import Trace
from estream.units import format_seconds

WIDTH, _LEFT, _RIGHT, _ROW, _GAP, _TOP = 1200, 110, 20, 26, 8, 54
_COLOURS = {
    "flash": "#c8702a",
    "dense": "#5b7fa6",
    "experts": "#2f5d8a",
    "wait": "#d9534f",
    "bank": "#8aa37b",
    "other": "#9a9a9a",
}


@dataclass(frozen=True)
class Piece:
    """Something that took from `start_s` to `end_s`. kind: a key of the legend's colours."""

    start_s: float
    end_s: float
    kind: str
    label: str = ""


Tracks = Mapping[str, Sequence[Piece]]


def timeline_svg(tracks: Tracks, title: str) -> str:
    """A whole SVG document. Pieces narrower than half a pixel are merged with neighbours of their kind."""
    total = max((piece.end_s for pieces in tracks.values() for piece in pieces), default=0.0) or 1.0
    scale = (WIDTH - _LEFT - _RIGHT) / total
    height = _TOP + len(tracks) * (_ROW + _GAP) + 56
    lines = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{WIDTH}" height="{height}" '
        f'viewBox="0 0 {WIDTH} {height}" font-family="sans-serif" font-size="13">',
        f'<rect width="{WIDTH}" height="{height}" fill="white"/>',
        f'<text x="{_LEFT}" y="26" font-size="16">{escape(title)}</text>',
    ]
    for row, (name, pieces) in enumerate(tracks.items()):
        y = _TOP + row * (_ROW + _GAP)
        lines.append(f'<text x="{_LEFT - 8}" y="{y + 18}" text-anchor="end">{escape(name)}</text>')
        lines.append(f'<rect x="{_LEFT}" y="{y}" width="{WIDTH - _LEFT - _RIGHT}" height="{_ROW}" fill="#f3f3f3"/>')
        for piece in _merged(pieces, 0.5 / scale):
            x, width = _LEFT + piece.start_s * scale, max((piece.end_s - piece.start_s) * scale, 0.3)
            told = f"{piece.label or piece.kind}: {format_seconds(piece.end_s - piece.start_s)}"
            lines.append(
                f'<rect x="{x:.1f}" y="{y}" width="{width:.1f}" height="{_ROW}" fill="{_COLOURS[piece.kind]}">'
                f"<title>{escape(told)}</title></rect>"
            )
    y = _TOP + len(tracks) * (_ROW + _GAP) + 10
    for tick in range(11):
        x = _LEFT + tick * (WIDTH - _LEFT - _RIGHT) / 10
        lines.append(f'<text x="{x:.1f}" y="{y + 6}" text-anchor="middle">{format_seconds(tick * total / 10)}</text>')
    used = {piece.kind for pieces in tracks.values() for piece in pieces}
    for number, kind in enumerate(kind for kind in _COLOURS if kind in used):
        x = _LEFT + 120 * number
        lines.append(f'<rect x="{x}" y="{y + 18}" width="14" height="14" fill="{_COLOURS[kind]}"/>')
        lines.append(f'<text x="{x + 20}" y="{y + 30}">{kind}</text>')
    return "\n".join([*lines, "</svg>"]) + "\n"


def planned_tracks(timeline: Timeline) -> dict[str, list[Piece]]:
    """flash and compute of a simulated prefill: what is neither experts nor waiting is dense work."""
    compute: list[Piece] = []
    now = 0.0
    for step in timeline.steps:
        if step.start_s > now:
            compute.append(Piece(now, step.start_s, "other", "dense work or waiting"))
        compute.append(Piece(step.start_s, step.end_s, "experts", f"layer {step.layer} group {step.index}"))
        now = step.end_s
    flash = [Piece(start, end, "flash", f"layer {layer}") for layer, start, end in timeline.reads]
    return {"flash": _merged(sorted(flash, key=lambda piece: piece.start_s), 0.0), "compute": compute}


def measured_tracks(trace: Trace) -> dict[str, list[Piece]]:
    """Lanes, compute and banks of a recorded prefill, from 0."""
    origin = min((span.start_s for span in trace.spans), default=0.0)
    tracks: dict[str, list[Piece]] = {}
    for span in sorted(trace.spans, key=lambda span: (span.track, span.start_s)):
        kind = _kind(span.track, span.name)
        if kind is not None:
            piece = Piece(span.start_s - origin, span.end_s - origin, kind, span.name)
            tracks.setdefault(span.track, []).append(piece)
    return dict(sorted(tracks.items(), key=lambda item: (not item[0].startswith("compute"), item[0])))


def _kind(track: str, name: str) -> str | None:
    if track.startswith("lane"):
        return "flash"
    if track.startswith("bank"):
        return "bank" if name.startswith(("Ready", "InUse")) else "flash" if name.startswith("Filling") else None
    if name.startswith("wait"):
        return "wait"
    if name.startswith(("layer", "shared", "ffn", "what waited")):
        return "experts"
    return "dense" if name.startswith(("attention", "router")) else "other"


def _merged(pieces: Sequence[Piece], gap_s: float) -> list[Piece]:
    """Neighbours of one kind that touch, or are closer than a gap and short themselves, become one."""
    merged: list[Piece] = []
    for piece in pieces:
        last = merged[-1] if merged else None
        if last is not None and last.kind == piece.kind and piece.start_s - last.end_s <= gap_s:
            label = last.label if last.label == piece.label else ""
            merged[-1] = Piece(last.start_s, max(last.end_s, piece.end_s), piece.kind, label)
        else:
            merged.append(piece)
    return merged
