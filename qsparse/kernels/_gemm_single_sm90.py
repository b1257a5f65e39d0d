"""The instances of ``gemm_single_sm90.cu``: small products of halves, one tile a block.

The tuning table and the costs decide where they serve (:mod:`qsparse.kernels._gemm_sm90_configs`).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS

SOURCE = "gemm_single_sm90.cu"
FORMATS = "128s128sPPiiifiiI"
WIDE = 16  # beside the pipeline's flags: rows of y are whole, aligned pieces of 16 bytes
_SHARED_LIMIT = 227 * 1024
_ROW = 128  # bytes of K that a stage holds of each row
_BOOL = ("false", "true")


@dataclass(frozen=True)
class Single:
    """One instance of the kernel; the names are its template parameters.

    ``bm x bn`` is a block's tile, ``cm x cn`` the blocks of a cluster that share loads, ``split`` those that divide K.
    """

    bm: int
    bn: int
    consumers: int
    stages: int
    cm: int = 1
    cn: int = 1
    split: int = 1

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions or a Hopper block would refuse."""
        rows = self.bm // self.consumers
        if self.bm % (64 * self.consumers) or rows * self.bn > 64 * 256 or self.bn not in (32, 64, 128, 256):
            raise ValueError(f"a consumer cannot hold its share of the tile: {self}")
        if self.bm // self.cn % 32 or self.bn // self.cm % 32:
            raise ValueError(f"the blocks of the cluster cannot divide the loads: {self}")
        if self.split > 1 and self.cm * self.cn > 1:
            raise ValueError(f"a cluster either splits K or shares loads: {self}")
        if self.bn % (8 * self.split):
            raise ValueError(f"the blocks of the cluster cannot divide the columns: {self}")
        if self.shared() > _SHARED_LIMIT:
            raise ValueError(f"{self.shared()} bytes of shared memory, {_SHARED_LIMIT} allowed: {self}")

    @property
    def cluster(self) -> int:
        return self.cm * self.cn * self.split

    def shared(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        tile, finished = self.bm * self.bn, self.bn // self.split
        received = (self.split - 1) * tile // self.split * 4
        panels = min(2, self.bm // (64 * self.consumers) * (finished // 64)) if finished % 64 == 0 else 0
        staged = self.stages * (self.bm + self.bn) * _ROW + self.consumers * panels * 8192 + 2 * self.bn * 2
        return staged + received + (2 * self.stages + 1) * 8 + 1024

    def reads(self, x_k: bool, w_k: bool) -> bool:
        """Whether the cluster can divide loads of operands that lie this way (64-wide boxes where not K-major)."""
        return (x_k or self.bm // self.cn % 64 == 0) and (w_k or self.bn // self.cm % 64 == 0)

    def suits(self, m: int, n: int, k: int) -> bool:
        """Whether each block gets a part of K, and the tiles can be counted by the reciprocal of a column of them."""
        return -(-k // 64) >= self.split and self.tiles(m, n) <= 2**16

    def tiles(self, m: int, n: int) -> int:
        """Tiles of whole clusters."""
        return -(-m // (self.bm * self.cm)) * -(-n // (self.bn * self.cn))

    def walk(self, m: int, n: int, k: int) -> tuple[int, int]:
        """The tiles of a column, and the number by which multiplying divides by them (0: one tile).

        ValueError for sizes that it does not suit: a block without a part of K would wait for ever.
        """
        if not self.suits(m, n, k):
            raise ValueError(f"{self} does not suit ({m}, {n}, {k})")
        column = -(-m // (self.bm * self.cm))
        return column, 0 if column == 1 else -(-(2**32) // column)

    def instance(self, dtype: torch.dtype, out: torch.dtype, x_k: bool = True, w_k: bool = True) -> str:
        """The C++ name of the kernel, which stores the operands' ``dtype`` and no other ``out``."""
        if out != dtype:
            raise ValueError(f"{SOURCE} multiplies {dtype} into {dtype}, not {out}")
        sizes = (self.bm, self.bn, self.consumers, self.stages, self.cm, self.cn, self.split)
        return f"gemm_single_sm90<{C_FLOATS[dtype]}, {_BOOL[x_k]}, {_BOOL[w_k]}, {', '.join(map(str, sizes))}>"


CONFIGS = (
    Single(64, 64, 1, 8),
    Single(64, 32, 1, 8),
    Single(64, 64, 1, 4, split=4),
    Single(64, 32, 1, 4, split=4),
    Single(64, 32, 1, 16),
    Single(64, 64, 1, 13, split=2),
    Single(64, 128, 1, 8),
    Single(64, 128, 1, 8, cm=2),
    Single(64, 128, 1, 8, cn=2),
    Single(128, 64, 2, 8, cn=2),
    Single(128, 128, 2, 6, cm=2),
    Single(128, 256, 2, 4),
    Single(128, 256, 2, 4, cm=2),
)


def _instances() -> Iterable[str]:
    for dtype in (torch.float16, torch.bfloat16):
        for x_k in (True, False):
            for w_k in (True, False):
                yield from (c.instance(dtype, dtype, x_k, w_k) for c in CONFIGS if c.reads(x_k, w_k))


INSTANCES = tuple(_instances())
