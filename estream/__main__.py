"""The `estream` command, also `python -m estream`: what has to be settled before anything large is imported."""

import sys

from estream.streams import keep_stdout_ours, open_closed_streams


def main() -> int:
    """Runs the command line and returns the exit status. Imports take a while, in which Ctrl-C is Ctrl-C too."""
    try:
        open_closed_streams()
        keep_stdout_ours()
        from estream.cli.main import main as command_line

        return command_line()
    except KeyboardInterrupt:
        print("estream: interrupted", file=sys.stderr)
        return 130


if __name__ == "__main__":
    raise SystemExit(main())
