"""The compiling process: `python -m qnn_graphs.htp.child MODEL SOC WRAPPER`.

The compiler prints its report to this process's own stdout and stderr, and a graph that it cannot digest may end the
process: both are reasons to keep it out of the caller's.
"""

from __future__ import annotations

import sys
from pathlib import Path

from estream.runtime.soc import find_soc
from qnn_graphs.htp.session import VERBOSE, open_session

COMPILED = "estream: compiled"


def main(arguments: list[str]) -> None:
    model, soc, wrapper = arguments
    open_session(Path(model).read_bytes(), find_soc(soc), severity=VERBOSE, context=Path(wrapper))
    print(COMPILED, flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
