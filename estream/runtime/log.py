"""What ONNX Runtime and its providers log: kept, not printed."""

from __future__ import annotations

from collections import deque

from estream.runtime.capi import LogFunction

_MOST = 8  # lines
_LONGEST = 300  # characters of one


class RuntimeLog:
    """The last errors that were logged. `function`: what ONNX Runtime calls, from any of its threads."""

    def __init__(self) -> None:
        self._lines: deque[str] = deque(maxlen=_MOST)
        self.function = LogFunction(self._keep)

    def take(self, told: str | None = None) -> str | None:
        """Forgets the lines, and returns those that do not only repeat `told`, the oldest first; None: none."""
        lines = [self._lines.popleft() for _ in range(len(self._lines))]
        new = [line for line in dict.fromkeys(lines) if told is None or (line not in told and told not in line)]
        return " | ".join(new) or None

    def _keep(self, _: object, severity: int, category: bytes, name: bytes, place: bytes, message: bytes) -> None:
        text = (message or b"").decode(errors="replace").strip()
        if text:
            self._lines.append(text[:_LONGEST])
