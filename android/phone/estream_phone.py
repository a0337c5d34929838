"""The program on the phone: one command, started through adb, that answers in JSON lines (docs/phone_protocol.md).

    python3 estream_phone.py run|calibrate|bench|probe     # the request is one line on stdin, which then stays open

All that needs numpy or native code is imported inside functions, once the streams are settled: whatever is missing or
breaks is then told as an event.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import platform
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

PROTOCOL = 1
ENDED = 128 + 15  # nobody waits for an answer any more, or a signal asked for an end
_GRACE_S = 2.0  # for the engine to give its memory back when the host has gone
_OFTEN_S = 0.1  # between two events of progress
_TARGET_OPTIONS = frozenset(("backend", "soc", "threads"))
_ENGINE_OPTIONS = _TARGET_OPTIONS | {
    *("strategy", "memory", "group", "banks", "lanes", "prefetch", "resident", "pinned", "dense"),
    *("reference", "direct_io", "verify_reads", "max_tokens"),
}

Request = dict[str, Any]


class Stopped(KeyboardInterrupt):
    """A signal: what was begun is undone, as after Ctrl-C."""


class Host:
    """The other end: events go there, and the end of file on stdin says that it has gone.

    stop: what lets the work in hand end early, from another thread.
    """

    def __init__(self) -> None:
        # Native libraries print to descriptor 1: that becomes stderr, and events have a descriptor of their own.
        self._out = os.dup(1)
        os.dup2(2, 1)
        sys.stdout = sys.stderr
        self._lock = threading.Lock()
        self._shown = ("", 0.0)
        self._finished = False
        self._watcher = threading.Thread(target=self._watch, name="stdin", daemon=True)
        self.gone = threading.Event()
        self.stop: Callable[[], None] | None = None

    def event(self, kind: str, **fields: Any) -> None:
        """One line. Raises BrokenPipeError where nobody reads."""
        line = json.dumps({"estream": PROTOCOL, "event": kind, **fields}, default=_plain, allow_nan=False)
        rest = memoryview(f"{line}\n".encode())
        with self._lock:
            while rest:
                rest = rest[os.write(self._out, rest) :]

    def progress(self, stage: str, done: int, total: int) -> None:
        """As `Engine` reports it; not every step is sent."""
        before, at = self._shown
        now = time.monotonic()
        if stage != before or done >= total or now - at >= _OFTEN_S:
            self._shown = stage, now
            self.event("progress", stage=stage, done=done, total=total)

    def finish(self, kind: str, **fields: Any) -> None:
        """The last event: what happens to stdin afterwards is of no interest."""
        self._finished = True
        self.event(kind, **fields)

    def fail(self, error: BaseException) -> int:
        """The error event of anything that was raised. Returns the exit status."""
        parts = {name: getattr(error, name, None) for name in ("asked", "had", "next_step")}
        if not hasattr(error, "thing"):  # not an EStreamError: the traceback is for whoever looks for the cause
            traceback.print_exception(error, file=sys.stderr)
        status = int(getattr(error, "exit_status", 1))
        self.finish(
            "error",
            **{"class": type(error).__name__},
            thing=str(getattr(error, "thing", error)),
            **{name: None if value is None else str(value) for name, value in parts.items()},
            exit_status=status,
        )
        return status

    def request(self) -> Request:
        """The first line of stdin. Raises Stopped where there is none, UsageError where it is no request."""
        from estream.errors import UsageError

        line = bytearray()
        while b"\n" not in line:
            piece = os.read(0, 1 << 16)
            if not piece:
                raise Stopped
            line += piece
        self._watcher.start()
        try:
            request = json.loads(line.partition(b"\n")[0])
        except ValueError as error:
            raise UsageError(f"the request is not JSON: {error}") from error
        if not isinstance(request, dict) or request.get("estream") != PROTOCOL:
            had = request.get("estream") if isinstance(request, dict) else None
            step = "Push the bundle again: estream device push"
            raise UsageError("the host speaks another version of the protocol", asked=had, had=PROTOCOL, next_step=step)
        return request

    def _watch(self) -> None:
        with contextlib.suppress(OSError):
            while os.read(0, 4096):
                pass
        if self._finished:
            return
        self.gone.set()
        if self.stop is not None:
            stopping = threading.Thread(target=self.stop, daemon=True)
            stopping.start()
            stopping.join(_GRACE_S)
        os._exit(ENDED)


def run(request: Request, host: Host) -> None:
    """One prefill. Leaves logits.npy, and hidden.npy and trace.json where asked for, in the folder `out`."""
    import numpy as np

    from estream.engine import Engine
    from estream.telemetry.thermal import hottest
    from estream.telemetry.trace import Trace

    ids, out = _ids(request), Path(_field(request, "out", str))
    trace = Trace() if request.get("trace") else None
    options = {"max_tokens": len(ids), **_options(request)}
    before = hottest()
    with Engine(_package(request), **options, trace=trace, progress=host.progress) as engine:
        host.stop = engine.close
        configuration = engine.configuration | {"prefetch": engine.prefetch_for(len(ids))}
        host.event("opened", configuration=configuration)
        result = engine.prefill(ids, hidden=bool(request.get("hidden")))
        host.stop = None
    temperature = {"before": before, "after": hottest()}
    out.mkdir(parents=True)
    files = []
    for name, array in (("logits.npy", result.logits), ("hidden.npy", result.hidden)):
        if array is not None:
            np.save(out / name, array)
            files.append(name)
    if trace is not None:
        trace.write(out / "trace.json")
        files.append("trace.json")
    assert result.logits is not None
    answer = {
        "tokens": result.tokens,
        "stats": result.stats.to_dict(),
        "configuration": result.configuration,
        "top": _top(result.logits, int(request.get("top") or 0)),
        "temperature": temperature,
        "onnxruntime": _runtime_version(request),
    }
    (out / "result.json").write_text(json.dumps(answer, default=_plain, indent=1) + "\n")
    host.finish("result", **answer, files=files)


def calibrate(request: Request, host: Host) -> None:
    """What `estream calibrate` does; the profile is kept here too, where automatic configurations look for it."""
    from estream.cache import cache_folder
    from estream.calibrate import calibrate as measure
    from estream.solver.profile import keep_profile
    from estream.telemetry.thermal import hottest

    options = _options(request, _TARGET_OPTIONS)
    before = hottest()
    measured = measure(_package(request), **options, progress=host.progress)
    profile, _ = keep_profile(measured, cache_folder())
    temperature = {"before": before, "after": hottest()}
    host.finish("result", profile=profile.to_dict(), temperature=temperature, onnxruntime=_runtime_version(request))


def bench(request: Request, host: Host) -> None:
    """Prefills of several lengths, one of each per round: what warms the phone up warms all of them."""
    import numpy as np

    from estream.engine import Engine
    from estream.telemetry.thermal import hottest

    lengths, rounds = _numbers(request, "tokens"), _field(request, "rounds", int)

    def opening(stage: str, done: int, total: int) -> None:
        if stage != "prefill":
            host.progress(stage, done, total)

    options = {"max_tokens": max(lengths), **_options(request)}
    with Engine(_package(request), **options, progress=opening) as engine:
        host.stop = engine.close
        host.event("opened", configuration=engine.configuration)
        draw = np.random.default_rng(int(request.get("seed") or 0))
        vocab = engine.package.architecture.vocab
        prompts = {tokens: draw.integers(0, vocab, tokens) for tokens in sorted(lengths)}
        engine.prefill(prompts[max(lengths)])  # the first one touches all memory, and is not counted
        for number in range(rounds):
            for place, tokens in enumerate(lengths):
                before = hottest()
                stats = engine.prefill(prompts[tokens]).stats.to_dict()
                temperature = {"before": before, "after": hottest()}
                host.event("measurement", tokens=tokens, round=number, stats=stats, temperature=temperature)
                host.progress("bench", number * len(lengths) + place + 1, rounds * len(lengths))
        configuration = engine.configuration
        host.stop = None
    host.finish("result", configuration=configuration, onnxruntime=_runtime_version(request))


def probe(request: Request, host: Host) -> None:
    """What `estream doctor` finds here; native libraries are tried in processes of their own."""
    from estream.doctor import examine
    from estream.telemetry.thermal import hottest

    folder = Path(_field(request, "folder", str))
    while not folder.is_dir():  # where it is yet to be made
        folder = folder.parent
    package = request.get("package")
    libraries = Path(_field(request, "libraries", str))
    diagnosis = examine(None if package is None else Path(package), libraries=libraries, folder=folder)
    host.finish("result", **diagnosis.to_dict(), temperature=hottest())


COMMANDS: dict[str, Callable[[Request, Host], None]] = {
    "run": run,
    "calibrate": calibrate,
    "bench": bench,
    "probe": probe,
}


def main(arguments: list[str]) -> int:
    """Returns the exit status: as the command line's on a host, and 143 where the host has gone."""
    host = Host()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, _stop)
    try:
        host.event("hello", **_versions())
        from estream.errors import UsageError

        if len(arguments) != 1 or arguments[0] not in COMMANDS:
            raise UsageError("unknown command", asked=" ".join(arguments), had=", ".join(COMMANDS))
        COMMANDS[arguments[0]](host.request(), host)
        return 0
    except BaseException as error:
        if host.gone.is_set():
            time.sleep(2 * _GRACE_S)  # the watcher ends the process
        if host.gone.is_set() or isinstance(error, Stopped | BrokenPipeError):
            return ENDED
        try:
            return host.fail(error)
        except BrokenPipeError:
            return ENDED


def _stop(number: int, frame: object) -> NoReturn:
    for other in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(other, lambda *_: os._exit(ENDED))  # asked twice: at once
    raise Stopped


def _versions() -> dict[str, Any]:
    import numpy as np

    from estream.version import __version__

    return {
        "version": __version__,
        "python": platform.python_version(),
        "numpy": np.__version__,
        "machine": platform.machine(),
        "pid": os.getpid(),
    }


def _runtime_version(request: Request) -> str:
    from estream.runtime.capi import find_library, load_capi

    return load_capi(find_library(request["libraries"])).version


def _field(request: Request, name: str, kind: type) -> Any:
    from estream.errors import UsageError

    value = request.get(name)
    if type(value) is not kind:
        raise UsageError(f"the request's {name} must be of type {kind.__name__}", asked=repr(value)[:200])
    return value


def _numbers(request: Request, name: str) -> list[int]:
    from estream.errors import UsageError

    values: list[int] = _field(request, name, list)
    if not values or any(type(value) is not int for value in values):
        raise UsageError(f"the request's {name} must be whole numbers", asked=repr(values)[:200])
    return values


def _ids(request: Request) -> list[int]:
    """`ids`, or the JSON list in the file `ids_file`."""
    if "ids_file" in request:
        request = {"ids": json.loads(Path(_field(request, "ids_file", str)).read_text())}
    return _numbers(request, "ids")


def _options(request: Request, known: frozenset[str] = _ENGINE_OPTIONS) -> dict[str, Any]:
    """What an Engine, or a measurement, is given beside the package."""
    from estream.errors import UsageError

    options = _field(request, "options", dict)
    if unknown := sorted(options.keys() - known):
        raise UsageError("the request has options that are not known", asked=unknown, had=", ".join(sorted(known)))
    return {**options, "libraries": _field(request, "libraries", str)}


def _package(request: Request) -> Path:
    """The packed model, if it is the one that the host has: `model` is the SHA-256 of its model.json."""
    from estream.errors import PackageError

    path, expected = Path(_field(request, "package", str)), request.get("model")
    step = f"Push it: estream device push {path.name}"
    if not path.is_dir():
        raise PackageError(f"{path.name} is not on the phone", asked=path, next_step=step)
    manifest = path / "model.json"
    if expected is None or not manifest.is_file():  # which opening the package tells
        return path
    if hashlib.sha256(manifest.read_bytes()).hexdigest() != expected:
        raise PackageError(f"{path.name} on the phone is not the host's", asked=path, next_step=step)
    return path


def _top(logits: Any, count: int) -> list[dict[str, Any]]:
    """The `count` largest of float32 [V]; equal ones in the order of their ids."""
    import numpy as np

    best = np.argsort(-logits, kind="stable")[:count]
    return [{"id": int(token), "logit": float(logits[token])} for token in best]


def _plain(value: Any) -> Any:
    """What JSON has, for numpy's numbers and for paths."""
    return value.item() if hasattr(value, "item") else str(value)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
