"""A compiled context against numpy, in a process of its own: `python -m qnn_graphs.htp.check SOURCE SOC WRAPPER`.

SOURCE is the ONNX file that was compiled. Prints one line: the largest relative error of any output.
"""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import onnx

from estream.runtime.soc import find_soc
from qnn_graphs.htp.evaluate import evaluate, random_feeds
from qnn_graphs.htp.session import open_session

CHECKED = "estream: error "
_PART_OF = {"rest": "logits"}  # outputs that correct another one are small beside it
TOLERANCE = 1e-2  # norm of the difference over norm of the output: float16 products are within 0.005


def largest_error(model: onnx.ModelProto, outputs: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> float:
    """Norm of the difference over norm, the largest of all outputs; infinite where one is not finite."""
    errors = [0.0]
    exact = evaluate(model, feeds)
    for name, expected in exact.items():
        actual = outputs[name].astype(np.float64)
        whole = exact[_PART_OF.get(name, name)]
        size = max(float(np.linalg.norm(whole.astype(np.float64))), 1e-6)
        error = float(np.linalg.norm(actual - expected)) / size
        errors.append(error if np.isfinite(error) else float("inf"))
    return max(errors)


def main(arguments: list[str]) -> None:
    source, soc, wrapper = arguments
    model = onnx.load(source)
    feeds = random_feeds(model)
    session = open_session(Path(wrapper), find_soc(soc))
    names = [output.name for output in session.get_outputs()]
    outputs = dict(zip(names, session.run(names, feeds), strict=True))
    print(f"{CHECKED}{largest_error(model, outputs, feeds):.6g}", flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
