"""The host side of ``spmm_csr_slab_sm90.cu``: products on Hopper where a block keeps all that it needs of x.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import itertools
import math
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import prepare

SOURCE = "spmm_csr_slab_sm90.cu"
PLAN_WIDTH = 128  # columns that a plan tells apart
SHARED = 211 * 1024  # bytes that a block may have beside those that the kernel declares itself
_LEAST_SHARED = 41 * 1024  # with these a launch asks for more than a block has by itself, as it must with less already
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_WARPS = 32
_ALONE = 17  # warps that share the memory for an entry by the time that one of them needs for it alone
_MOST_ROWS = 32 * _WARPS  # a lane looks for one row of its warp's
_SPLITS = {1: 132, 2: 132, 4: 120, 8: 120}  # blocks of a cluster, and how many blocks run at once in such clusters
_ENTRY = {(4, 1): 0.72e-3, (4, 2): 1.38e-3, (2, 2): 0.92e-3}  # µs of an entry, by a value's bytes and rows a lane
_ROW = {(4, 1): 0.015, (4, 2): 0.013, (2, 2): 0.025}  # µs of a row


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    return tuple(
        f"spmm_csr_slab<{value}, {index}, {v}, {_WARPS}>"
        for dtype, value in C_FLOATS.items()
        for index in _INDICES.values()
        for itemsize, v in _ENTRY
        if itemsize == dtype.itemsize
    )


@dataclass(frozen=True)
class Choice:
    """``v`` batch rows a lane, ``rows`` of W a block, and the blocks that ``split`` K for the same outputs."""

    v: int
    rows: int
    split: int

    @property
    def batch(self) -> int:
        """Batch rows of a block."""
        return 32 * self.v

    def width(self, k: int) -> int:
        """Columns of a block."""
        return k if self.split == 1 else -(-k // (self.split * PLAN_WIDTH)) * PLAN_WIDTH

    @property
    def share(self) -> int:
        """Rows whose sums a block adds up."""
        return -(-self.rows // self.split)

    def shared(self, k: int, itemsize: int) -> int:
        """Dynamic shared memory of a block, in bytes: its slab with a line of zeros, and the whole cluster's sums."""
        slab = (self.width(k) + 1) * self.batch * itemsize
        return max(slab + self.split * self.share * (self.batch + 4) * 4, _LEAST_SHARED)

    def fits(self, k: int, itemsize: int) -> bool:
        """Whether a block has the memory, and warps for its rows."""
        return self.shared(k, itemsize) <= SHARED and self.rows <= _MOST_ROWS

    def waves(self, m: int, n: int, processors: int) -> int:
        """How often a multiprocessor has a block of the product."""
        return -(-(-(-n // self.rows) * -(-m // self.batch) * self.split) // min(processors, _SPLITS[self.split]))


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, nnz: int, itemsize: int, processors: int) -> tuple[float, Choice | None]:
    """What takes the least time, as far as this model of an H200 knows, and its µs; None where nothing fits.

    A block waits for memory and fills its slab; each row keeps a warp a while; an entry costs reading a line of the
    slab, and a warp that has no others beside it waits longer for it; blocks that divide K wait for each other.
    """

    def time(choice: Choice) -> float:
        width, kind = choice.width(k), (itemsize, choice.v)
        slab = width * choice.batch * itemsize / 40e3
        entries = nnz / n / k * width * max(choice.rows, -(-choice.rows // _WARPS) * _ALONE) * _ENTRY[kind]
        wave = 3.4 + slab + choice.rows * _ROW[kind] + entries + (1.0 if choice.split > 1 else 0.0)
        return 4.4 + choice.waves(m, n, processors) * wave

    best = (math.inf, None)
    for (size, v), (split, at_once) in itertools.product(_ENTRY, _SPLITS.items()):
        if size != itemsize or (split > 1 and k < split * PLAN_WIDTH):
            continue
        across = -(-m // (32 * v)) * split
        for waves in range(1, 9):
            choice = Choice(v, -(-n // max(1, waves * min(processors, at_once) // across)), split)
            if choice.fits(k, itemsize) and (took := time(choice)) < best[0]:
                best = took, choice
    return best


def run(choice: Choice, x, values, cols, row_offsets, plan, y, matrix: bytes, output: bytes) -> None:
    """The product by one choice; ``plan`` where blocks divide K, ``matrix`` and ``output`` as kernels take x and y."""
    (m, k), n = x.shape, y.shape[1]
    arrays, virtual, stride, total = (0, 0, 0), n, 0, n
    if choice.split > 1:
        arrays = tuple(a.data_ptr() for a in (plan.segments(PLAN_WIDTH), plan.parts, plan.first))
        stride = plan.most_parts
        virtual, total = (n, n) if plan.splits is False else (stride, -1)
    blocks = -(-virtual // choice.rows)
    kernel = prepare(
        x.device.index,
        SOURCE,
        f"spmm_csr_slab<{C_FLOATS[x.dtype]}, {_INDICES[cols.dtype]}, {choice.v}, {_WARPS}>",
        f"{len(matrix)}sPPPPPP{len(output)}siiiiiiiii",
        blocks * -(-m // choice.batch) * choice.split,
        32 * _WARPS,
        choice.shared(k, x.element_size()),
        cluster=choice.split,
    )
    entries = values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr()
    slabs, reciprocal = -(-k // PLAN_WIDTH), -(-(2**20) // choice.share)
    sizes = (n, stride, blocks, choice.rows, choice.split, choice.width(k), slabs, total, reciprocal)
    kernel((matrix, *entries, *arrays, output, *sizes))
