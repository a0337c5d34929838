"""What a layer loop shows of itself, and lets be replaced, when somebody asks: for `selftest`. None costs nothing."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

import numpy as np

Rows = slice | np.ndarray


class Observer(Protocol):
    """Called after each piece of work, the same for every target.

    | graph | layer | rows | arrays, float32 [rows, width] |
    | input | 0 ... L: before layer `layer`, L: before the final norm | all | hidden |
    | qkv | the layer | a block | q, k, v: after norm and RoPE |
    | attention | the layer | a block | attn |
    | conv | the layer | a block | attn: in the place of qkv and attention in a convolution layer |
    | o_router, o_norm | the layer | all | hidden, normed; logits (o_router) |
    | expert, shared, ffn | the layer | a tile, indices | y, the gates included |
    | final_norm | L | all that are asked for | normed |

    normed is float16 on htp.

    Arrays are valid during the call. Those of `input`, `o_router`, `o_norm` and `final_norm` are the host's own: what
    is written into them is what the work goes on with. panel: number of the panel within its layer's records, within
    its record for `shared` and `ffn`; None elsewhere.
    """

    def __call__(
        self, layer: int, graph: str, rows: Rows, arrays: Mapping[str, np.ndarray], panel: int | None = None
    ) -> None: ...
