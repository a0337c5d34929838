"""Column chunks: how many pieces a weight matrix is stored in, and the head groups that those of q, k and v follow.

A chunk is a contiguous matrix of its own, and an input of its own of every graph that takes the weight: what the NPU
streams through its on-chip memory without spilling. Arithmetic only.

Run-time part: the standard library only.
"""

from __future__ import annotations

from dataclasses import dataclass

from estream.models.base import Architecture, Attention

CHUNK_ELEMENTS = 1 << 20  # of a column chunk: twice as many spill, several times the ideal traffic
UNIT = 32  # chunks are whole multiples of so many columns: an NPU tile
MAX_CHUNKS = 64  # of a matrix: real models have half as many, and a stranger's package may ask for anything
CONV_LINEARS = ("conv_b", "conv_c", "conv_x")  # a convolution layer's projections: two gates and what is convolved


def chunk_names(name: str, chunks: int) -> list[str]:
    """Names of a matrix's column chunks, in order: the name itself where there is one."""
    return [name] if chunks == 1 else [f"{name}.{chunk}" for chunk in range(chunks)]


def panel_chunks(hidden: int, width: int, scheme: str) -> int:
    """Column chunks of each of a panel's matrices: the least power of two that the on-chip memory of every SoC likes.

    f32, which no NPU takes, has one."""
    chunks = 1
    while (
        scheme != "f32"
        and chunks < MAX_CHUNKS
        and hidden * width // chunks > CHUNK_ELEMENTS
        and width % (2 * UNIT * chunks) == 0
        and hidden % (2 * UNIT * chunks) == 0
    ):
        chunks *= 2
    return chunks


def column_chunks(depth: int, width: int, *, unit: int = UNIT, multiple_of: int = 1) -> int:
    """The least number of equal column chunks of a weight [depth, width] that hold at most CHUNK_ELEMENTS each.

    Chunks are whole multiples of `unit` columns. Where no number does, the most that `unit` and MAX_CHUNKS allow.

    Raises:
        ValueError: the columns do not divide so.
    """
    most = min(width // unit, MAX_CHUNKS)
    counts = [n for n in range(multiple_of, most + 1, multiple_of) if width % (n * unit) == 0]
    if not counts:
        raise ValueError(f"{width} columns do not divide into {multiple_of} chunks of whole {unit} columns")
    return next((n for n in counts if depth * (width // n) <= CHUNK_ELEMENTS), counts[-1])


def linear_chunks(arch: Architecture, name: str, width: int, scheme: str) -> int:
    """Column chunks of a dense matrix with `width` columns: q, k, v, o, head, a latent or a convolution's projection.

    One where they do not divide. A convolution's are q's: it writes what attention would."""
    if scheme == "f32":
        return 1
    try:
        if name in ("q", "k", "v"):
            return qkv_chunks(arch, name)
        if name in CONV_LINEARS:
            return qkv_chunks(arch, "q")
        return column_chunks(arch.attention.out_width if name == "o" else arch.hidden, width)
    except ValueError:
        return 1


def qkv_chunks(arch: Architecture, name: str) -> int:
    """Column chunks of q, k or v: whole heads, and a whole number of chunks per head group or of groups per chunk."""
    a, groups = arch.attention, head_groups(arch.attention)
    heads, count = (a.heads, groups.groups) if name == "q" else (a.kv_heads, groups.kv_groups)
    depth, head = projection(a, arch.hidden, name)
    return column_chunks(depth, heads * head, unit=head, multiple_of=count)


def projection(attention: Attention, hidden: int, name: str) -> tuple[int, int]:
    """(rows, columns per head) of the matrix q, k or v. Of latent attention, k is without what turns."""
    a, latent = attention, attention.latent
    if latent is None:
        return hidden, a.v_dim if name == "v" else a.head_dim
    if name == "q":
        return hidden if latent.query_rank is None else latent.query_rank, a.head_dim
    return latent.rank, a.v_dim if name == "v" else a.head_dim - a.rotated


@dataclass(frozen=True)
class HeadGroups:
    """Heads that one call of the NPU's attention core computes. Group g takes K and V of KV group g // sharing."""

    groups: int
    heads: int  # query heads of a group
    kv_heads: int  # KV heads of a group
    sharing: int  # groups that share a KV head
    head_dim: int
    v_dim: int

    @property
    def kv_groups(self) -> int:
        return self.groups // self.sharing

    def q_shape(self, rows: int) -> tuple[int, int, int]:
        """The query heads of a KV head are rows of one matrix: [kv_heads, heads / kv_heads · rows, D]."""
        return self.kv_heads, self.heads // self.kv_heads * rows, self.head_dim

    def k_shape(self, rows: int) -> tuple[int, int, int]:
        """Already transposed: [kv_heads, D, rows]."""
        return self.kv_heads, self.head_dim, rows

    def v_shape(self, rows: int) -> tuple[int, int, int]:
        return self.kv_heads, rows, self.v_dim

    def attn_shape(self, rows: int) -> tuple[int, int, int]:
        """As q_shape, of what attention gives."""
        return self.kv_heads, self.heads // self.kv_heads * rows, self.v_dim


def head_groups(attention: Attention, largest: int = 4) -> HeadGroups:
    """Groups of at most `largest` query heads: several KV heads with all their query heads, or a part of one's."""
    folded, dims = attention.heads // attention.kv_heads, (attention.head_dim, attention.v_dim)
    if folded > largest:
        heads = max(n for n in range(1, largest + 1) if folded % n == 0)
        return HeadGroups(attention.heads // heads, heads, 1, folded // heads, *dims)
    most = min(attention.kv_heads, largest)
    whole = [n for n in range(1, most + 1) if attention.kv_heads % n == 0 and n * folded <= largest]
    return HeadGroups(attention.kv_heads // whole[-1], whole[-1] * folded, whole[-1], 1, *dims)
