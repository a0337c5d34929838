"""How far a graph's rows may be from the reference lowering's, by scheme and target.

Relative errors of rows. `worst` bounds every row and finds rows that are dropped (error 1), stale or foreign (about
1.4). `typical` bounds the median row and finds what is a little wrong everywhere, such as the wrong scales.

Measured, largest over the layers of each model, 64 random tokens, target cpu against its reference:

| graph | int8, derived demonstration model: worst, typical | int8, random models |
| qkv | 0.30, 0.11 | 0.013, 0.007 |
| attention | 0.30, 0.24 | 0.046, 0.013 |
| o_router | 0.30, 0.24 | 0.043, 0.014 |
| shared | 0.43, 0.06 | 0.042, 0.012 |
| expert | 0.39, 0.14 | 0.039, 0.020 |
| sum | 0.10, 0.06 | 0.034, 0.022 |
| head, by slices | 0.09, 0.015 | 0.009, 0.006 |

int4 experts are integers under one scale per channel, too: the same figures. Its activations have one 8-bit scale per
row, which a massive activation fills alone: real models have such rows, random ones do not. f32 and f16 run the
reference's own kernels on cpu: 0.

Target htp (simulated), 16-bit activations, 64 random tokens, derived demonstration model in int8, worst and typical:
qkv 0.0013, 0.0005; attention 0.004, 0.0022; o_router 0.084, 0.002; shared 0.016, 0.0011; expert 0.005, 0.001; sum
0.002; final_norm 0.0004, 0.0003; head 0.0008, 0.0003. Random models: attention 0.009, 0.003, o_router 0.009, 0.002.
"""

from __future__ import annotations

from dataclasses import dataclass

from estream.package.layout import INTEGER_GRAPHS, INTEGER_SCHEMES


@dataclass(frozen=True)
class Tolerance:
    """Largest relative error of any row, and of the median row."""

    worst: float
    typical: float


_EXACT = Tolerance(1e-3, 1e-4)
_EIGHT_BIT = {
    "qkv": Tolerance(0.7, 0.2),
    "attention": Tolerance(0.7, 0.4),  # of what the 8-bit projections before it give
    "conv": Tolerance(0.7, 0.4),  # a product of three 8-bit projections
    "o_router": Tolerance(0.7, 0.4),
    "o_norm": Tolerance(0.7, 0.4),
    "ffn": Tolerance(0.7, 0.15),
    "shared": Tolerance(0.7, 0.15),
    "expert": Tolerance(0.7, 0.25),
    "sum": Tolerance(0.5, 0.15),
    "head": Tolerance(0.3, 0.1),
}
_HALF = {
    "qkv": Tolerance(0.01, 0.003),
    "attention": Tolerance(0.05, 0.015),
    "conv": Tolerance(0.05, 0.015),
    "o_router": Tolerance(0.3, 0.01),  # rows with a massive activation, which the layer's part is small beside
    "o_norm": Tolerance(0.3, 0.01),
    "ffn": Tolerance(0.1, 0.008),
    "shared": Tolerance(0.1, 0.008),
    "expert": Tolerance(0.05, 0.008),
    "sum": Tolerance(0.02, 0.005),
    "final_norm": Tolerance(0.01, 0.003),
    "head": Tolerance(0.01, 0.003),
}
_EXPERTS = ("ffn", "shared", "expert", "sum")


@dataclass(frozen=True)
class Tolerances:
    """For a package with these weight schemes on a target that runs the package's `graphs`."""

    graphs: str
    experts: str
    dense: str

    @property
    def rounding(self) -> float:
        """Rounding of the hidden state itself, relative to its norm."""
        return 2.0**-10 if self.graphs == "htp" else 2.0**-20

    def of(self, graph: str) -> Tolerance:
        """`graph`: a name of `compare.ORDER`."""
        if self.graphs == "htp":
            return _HALF[graph]
        scheme = self.experts if graph in _EXPERTS else self.dense
        integers = self.graphs in INTEGER_GRAPHS and scheme in INTEGER_SCHEMES
        return _EIGHT_BIT.get(graph, _EXACT) if integers else _EXACT
