"""The process's ONNX Runtime environment and its thread pool, shared by all targets that fit it."""

from __future__ import annotations

import threading
from contextlib import ExitStack
from dataclasses import dataclass

from estream.runtime.capi import CApi
from estream.runtime.log import RuntimeLog

# Errors. Most come back as a status, too, and become a TargetError; but why the NPU's back end refuses is only logged.
LOG_SEVERITY = 3

_ALL_OPTIMISATIONS = 99


@dataclass
class _Shared:
    handle: int
    log: RuntimeLog
    threads: int
    users: int


_lock = threading.Lock()
_shared: dict[int, _Shared] = {}  # by CApi


class Environment:
    """A counted use of the environment of one library; the last user's `close` releases it.

    ONNX Runtime has one environment per process and its pool's size is fixed by the first user. Sessions of a target
    that asks for another number of threads get pools of their own.
    """

    def __init__(self, api: CApi, threads: int) -> None:
        self._api = api
        self.threads = threads
        with _lock:
            shared = _shared.get(id(api))
            if shared is None:
                shared = _shared[id(api)] = _Shared(*_create(api, threads), threads, 0)
            shared.users += 1
        self._shared: _Shared | None = shared
        self.handle = shared.handle
        self.log = shared.log
        self.shares_pool = shared.threads == threads

    def session_options(self) -> int:
        """New session options; the caller releases them."""
        api, what = self._api, "session options"
        options = api.create("CreateSessionOptions", what=what)
        with ExitStack() as on_error:
            on_error.callback(api.release, "SessionOptions", options)
            if self.shares_pool:
                api.call("DisablePerSessionThreads", options, what=what)
            else:
                api.call("SetIntraOpNumThreads", options, self.threads, what=what)
                api.call("SetInterOpNumThreads", options, 1, what=what)
                for pool in ("intra", "inter"):
                    key = f"session.{pool}_op.allow_spinning".encode()
                    api.call("AddSessionConfigEntry", options, key, b"0", what=what)
            # Shapes change from run to run and inputs lie in our memory: patterns and arenas would only hold memory.
            api.call("DisableMemPattern", options, what=what)
            api.call("DisableCpuMemArena", options, what=what)
            api.call("SetSessionLogSeverityLevel", options, LOG_SEVERITY, what=what)
            api.call("SetSessionGraphOptimizationLevel", options, _ALL_OPTIMISATIONS, what=what)
            on_error.pop_all()
        return options

    def close(self) -> None:
        """Gives the use back. Twice is harmless."""
        with _lock:
            shared, self._shared = self._shared, None
            if shared is None:
                return
            shared.users -= 1
            if shared.users == 0:
                del _shared[id(self._api)]
                self._api.release("Env", shared.handle)


def _create(api: CApi, threads: int) -> tuple[int, RuntimeLog]:
    """An environment and its log, which must outlive it.

    It has one pool of `threads` threads (the caller's included) that sleep when idle.

    Spinning threads would take the cores that flash reads need.
    """
    what = "ONNX Runtime environment"
    options = api.create("CreateThreadingOptions", what=what)
    try:
        api.call("SetGlobalIntraOpNumThreads", options, threads, what=what)
        api.call("SetGlobalInterOpNumThreads", options, 1, what=what)
        api.call("SetGlobalSpinControl", options, 0, what=what)
        create, log = "CreateEnvWithCustomLoggerAndGlobalThreadPools", RuntimeLog()
        return api.create(create, log.function, None, LOG_SEVERITY, b"estream", options, what=what), log
    finally:
        api.release("ThreadingOptions", options)
