"""The `estream` command: parses the arguments, runs one command, turns errors into messages and exit statuses.

Exit status: 0 done, 1 failed, 2 wrong usage, 129 hung up, 130 interrupted, 141 nobody reads our output, 143 terminated.
"""

from __future__ import annotations

import argparse
import logging
import os
import signal
import sys
import threading
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

from estream.cli import (
    bench,
    calibrate,
    calibrate_experts,
    compile,
    completion,
    device,
    doctor,
    inspect,
    pack,
    perplexity,
    plan,
    prefill,
    selftest,
    simulate,
    suggest,
    synth,
    verify,
)
from estream.cli.commands import add_commands
from estream.cli.console import Console
from estream.errors import EStreamError
from estream.version import __version__

# Command modules keep their heavy imports inside run(), so that --help and completion are quick.
COMMANDS = (
    pack,
    synth,
    inspect,
    verify,
    compile,
    calibrate,
    calibrate_experts,
    plan,
    simulate,
    prefill,
    perplexity,
    bench,
    selftest,
    doctor,
    device,
    completion,
)

INTERRUPTED = 128 + 2  # what a shell reports for SIGINT
BROKEN_PIPE = 128 + 13  # and for SIGPIPE
TERMINATED = 128 + 15  # and for SIGTERM


class Terminated(KeyboardInterrupt):
    """SIGTERM: what was begun is undone, as after Ctrl-C."""


class Parser(argparse.ArgumentParser):
    """Reports mistakes in the words of every other error of the command line."""

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        hint = suggest.choice_hint(message)
        self.exit(2, f"estream: error: {message}{'. ' if hint else ''}{hint}\n")

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Refuses unknown options here, where the command and its options are known."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            options = [option for action in self._actions for option in action.option_strings]
            hint = suggest.hint(unknown[0].partition("=")[0], options)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{'. ' if hint else ''}{hint}")
        return found, unknown


def build_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line, one sub-parser per file of this folder."""
    parser = Parser(
        prog="estream",
        description="Prefill of Mixture-of-Experts language models with the expert weights in flash.",
        epilog="Each command has an example: estream COMMAND --help",
        allow_abbrev=False,
    )
    parser.add_argument("--version", action="version", version=f"estream {__version__}")
    add_commands(parser, COMMANDS, "command")
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line and returns the exit status. argparse leaves by SystemExit (usage: 2, --help: 0)."""
    with _sigterm_raises():
        return _main(argv)


def _main(argv: Sequence[str] | None) -> int:
    args, console, debug = argparse.Namespace(), Console(), bool(os.environ.get("ESTREAM_DEBUG"))
    try:
        args = _parsed(argv)
        debug = debug or args.verbose >= 2
        _log_to_stderr(args.quiet, args.verbose)
        console = Console(quiet=args.quiet, verbose=args.verbose, json=getattr(args, "json", False))
        status: int = args.run(args, console)
        sys.stdout.flush()  # a closed pipe must show here, where it is caught
        return status
    except BrokenPipeError:
        _drop_output()
        return BROKEN_PIPE
    except Terminated:
        console.error("terminated")
        return TERMINATED
    except KeyboardInterrupt:
        console.error("interrupted")
        return INTERRUPTED
    except EStreamError as error:
        _traceback_if(debug)
        console.error(f"error: {error}{suggest.missing_path_hint(vars(args), str(error), error)}")
        return error.exit_status
    except OSError as error:
        _traceback_if(debug)
        message = _os_message(error)
        try:
            sys.stdout.flush()
        except OSError:
            message = f"standard output: {message}"
            _drop_output()
        console.error(f"error: {message}{suggest.missing_path_hint(vars(args), message, error)}")
        return 1
    except MemoryError:
        _traceback_if(debug)
        console.error("error: out of memory. Give a smaller --memory, or use a smaller package.")
        return 1
    except Exception as error:
        _traceback_if(debug)
        hint = "" if debug else " This is a bug in EStream: run again with -vv for the traceback."
        console.error(f"error: unexpected {type(error).__name__}: {error}.{hint}")
        return 1


@contextmanager
def _sigterm_raises() -> Iterator[None]:
    """Temporary folders go and outputs are whole or absent when a supervisor stops us."""
    if threading.current_thread() is not threading.main_thread():
        yield  # a program that calls main() from a thread has its own handler
        return

    def stop(number: int, frame: object) -> NoReturn:
        raise Terminated

    before = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _parsed(argv: Sequence[str] | None) -> argparse.Namespace:
    try:
        return build_parser().parse_args(argv)
    finally:
        sys.stdout.flush()  # of --help


def _drop_output() -> None:
    """The interpreter flushes stdout once more at exit: gives it somewhere to go."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _os_message(error: OSError) -> str:
    reason = error.strerror or str(error)
    return f"{error.filename}: {reason}" if error.filename is not None else reason


def _traceback_if(debug: bool) -> None:
    if debug:
        traceback.print_exc(file=sys.stderr)


def _log_to_stderr(quiet: bool, verbose: int) -> None:
    """Shows what the library logs under 'estream': warnings by default, more with -v, errors only with -q."""
    log = logging.getLogger("estream")
    log.setLevel(logging.ERROR if quiet else (logging.WARNING, logging.INFO, logging.DEBUG)[min(verbose, 2)])
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(_Formatter())
    log.handlers[:] = [handler]
    log.propagate = False


class _Formatter(logging.Formatter):
    def format(self, record: logging.LogRecord) -> str:
        return f"estream: {record.levelname.lower()}: {record.getMessage()}"
