"""The process's standard streams, settled before anything large is imported."""

import io
import os
import sys


def open_closed_streams() -> None:
    """Where the shell closed a stream (`>&-`), the next file opened would get its number, and what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


def keep_stdout_ours() -> None:
    """Native libraries print to descriptor 1 (the NPU's does when it is loaded): that becomes nowhere, and sys.stdout
    has a descriptor of its own. What is piped on, JSON for example, is what the command says and nothing else."""
    stdout = sys.stdout
    if not isinstance(stdout, io.TextIOWrapper) or stdout is not sys.__stdout__ or stdout.fileno() != 1:
        return
    own = os.fdopen(os.dup(1), "w", encoding=stdout.encoding, errors=stdout.errors)
    own.reconfigure(line_buffering=stdout.isatty())
    nowhere = os.open(os.devnull, os.O_WRONLY)
    os.dup2(nowhere, 1)
    os.close(nowhere)
    sys.stdout = own
