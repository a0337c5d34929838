"""The `estream` command, also `python -m estream`: what has to be settled before anything large is imported."""

import os
import sys


def main() -> int:
    """Runs the command line and returns the exit status. Imports take a while, in which Ctrl-C is Ctrl-C too."""
    try:
        _open_closed_streams()
        from estream.cli.main import main as command_line

        return command_line()
    except KeyboardInterrupt:
        print("estream: interrupted", file=sys.stderr)
        return 130


def _open_closed_streams() -> None:
    """Where the shell closed a stream (`>&-`), the next file opened would get its number, and what is printed."""
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:
            setattr(sys, name, open(os.devnull, mode))  # noqa: SIM115


if __name__ == "__main__":
    raise SystemExit(main())
