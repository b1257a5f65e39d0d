"""The host side of ``sddmm_sm80.cu``, ``sddmm_slab_sm80.cu`` and ``sddmm_few_sm80.cu``.

The face of the operation is :mod:`qsparse.kernels.sddmm`.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS, matrix
from qsparse.kernels._load import launch, multiprocessors
from qsparse.kernels._spmm_groups_sm90 import turned
from qsparse.kernels._spmm_sm80 import INDICES, MATRIX, WEIGHTS, Plan, shared_budget, wide

SOURCE, SLAB_SOURCE, FEW_SOURCE = "sddmm_sm80.cu", "sddmm_slab_sm80.cu", "sddmm_few_sm80.cu"
_WIDTH = 128  # columns of a slab
_CONSUMERS, _WARPS = 12, 16
_MOST_ROWS = 192
_LINE = 512  # bytes of a column's batch rows in a slab
_FEW_THREADS = {8: 1024, 16: 512}  # of a block, by the batch rows that its lines have

_SLAB_WARPS, _SLAB_STATIC, _SUM_BLOCK = 16, 4096, 256


def instances() -> dict[str, tuple[str, ...]]:
    """All kernels, by source."""
    pairs = [(dtype, value, index) for dtype, value in C_FLOATS.items() for index in INDICES.values()]
    slabs = tuple(f"sddmm_slab<{value}, {index}, {_lane(dtype.itemsize)}>" for dtype, value, index in pairs)
    few = (f"sddmm_few<{value}, {index}, {batch}>" for _, value, index in pairs for batch in _FEW_THREADS)
    return {
        FEW_SOURCE: tuple(few),
        SOURCE: tuple(f"sddmm_tiles<{value}, {index}>" for _, value, index in pairs),
        SLAB_SOURCE: ("sddmm_sum", *slabs),
    }


def _lane(itemsize: int) -> int:
    """Batch rows of a lane in a slab: two words."""
    return 8 // itemsize


@dataclass(frozen=True)
class Slabs:
    """How blocks share out a product: ``rows`` of W, ``slices`` of its columns, ``steps`` slabs of the batch each."""

    rows: int
    slices: int
    steps: int

    def width(self, k: int) -> int:
        """Columns of a block."""
        return k if self.slices == 1 else -(-k // (self.slices * _WIDTH)) * _WIDTH

    def shared(self, k: int) -> int:
        """Dynamic shared memory of a block, in bytes: its slab, and a line of zeros."""
        return (self.width(k) + 1) * 256

    def ranges(self, m: int, itemsize: int) -> int:
        """Parts of the batch, each with its own sums."""
        return -(-m // (32 * _lane(itemsize) * self.steps))


@functools.lru_cache(maxsize=4096)
def choose_slabs(m: int, n: int, k: int, nnz: int, itemsize: int, budget: int, processors: int) -> Slabs | None:
    """What takes the least time, as far as this model of an H200 knows, in µs; None where nothing fits.

    A block waits for memory and fills its slabs; each row keeps a warp a while, since its columns come from far; an
    entry costs reading a line of the slab and adding up over the lanes; a second kernel adds up ranges of the batch.
    """
    slabs = -(-m // (32 * _lane(itemsize)))

    def time(choice: Slabs) -> float:
        width, ranges = choice.width(k), choice.ranges(m, itemsize)
        entries = nnz / n / k * width * choice.rows
        waves = -(-(-(-n // choice.rows) * choice.slices * ranges) // processors)
        step = width * 256 / 40e3 + entries * 4.9e-3 + choice.rows * 0.06
        return waves * (2.4 + choice.steps * step) + (5 + ranges * nnz / 5e5 if ranges > 1 else 0)

    best = (math.inf, None)
    for slices in (1, 2, 4, 8, 16):
        if slices > 1 and k < slices * _WIDTH:
            continue
        for steps in sorted({-(-slabs // parts) for parts in (1, 2, 4, 8, 16, 32, 64, 128)}):
            for waves in (1, 2, 3, 4):
                across = slices * -(-slabs // steps)
                choice = Slabs(-(-n // max(1, waves * processors // across)), slices, steps)
                if choice.shared(k) <= budget and (took := time(choice)) < best[0]:
                    best = took, choice
    return best[1]


def slabs_pay(choice: Slabs, m: int, n: int, k: int, nnz: int) -> bool:
    """Whether slabs that stay take less time than those that come and go, on an H200: for few rows of x or entries."""
    return choice.steps == 1 and (m <= 128 or (choice.slices == 1 and 32 * nnz <= n * k))


@functools.lru_cache(maxsize=4096)
def block_rows(n: int, k: int, nnz: int, processors: int) -> int:
    """The rows of W a block with the fewest clocks: for its entries, or for its slabs' way from the L2 cache."""

    def clocks(rows: int) -> float:
        waves = -(-(-(-n // rows) * -(-k // _WIDTH)) // processors)
        return waves * max(rows * (nnz / n / k * min(k, _WIDTH) * 6.5 + 10), min(k, _WIDTH) * 13)

    return min(range(min(n, _MOST_ROWS), 0, -1), key=clocks)


def sddmm(dy, x, cols, row_offsets, plan: Plan | None) -> torch.Tensor:
    """The (nnz,) float32 sums of ``dy[:, n] * x[:, k]`` over the batch, of arrays that are checked."""
    (m, n), k = dy.shape, x.shape[1]
    budget, (_, processors) = shared_budget(x.device.index), multiprocessors(x.device.index)
    if few_rows(m, k, x.element_size(), budget):
        return run_few(dy, x, cols, row_offsets)
    slabs = choose_slabs(m, n, k, cols.numel(), x.element_size(), budget, processors)
    if slabs and slabs_pay(slabs, m, n, k, cols.numel()):
        return run_slabs(slabs, dy, x, cols, row_offsets, plan)
    return run_tiles(block_rows(n, k, cols.numel(), processors), dy, x, cols, row_offsets, plan)


def few_rows(m: int, k: int, itemsize: int, budget: int) -> int:
    """Batch rows of a line, where all of x fits a block's shared memory in lines of one column each; else 0."""
    batch = next((batch for batch in _FEW_THREADS if m <= batch), 0)
    return batch if batch * k * itemsize <= budget else 0


def run_few(dy, x, cols, row_offsets) -> torch.Tensor:
    """The same with all of x in every block, whatever W's pattern: for few rows, which :func:`few_rows` accepts."""
    (m, n), k, nnz, itemsize = dy.shape, x.shape[1], cols.numel(), x.element_size()
    _, processors = multiprocessors(x.device.index)
    batch = few_rows(m, k, itemsize, shared_budget(x.device.index))
    warps = _FEW_THREADS[batch] // 32
    blocks = min(processors, -(-nnz // (32 * warps)))
    share = -(-nnz // (blocks * warps * 32)) * 32
    out = torch.empty(nnz, dtype=torch.float32, device=x.device)
    entries = cols.data_ptr(), row_offsets.data_ptr(), out.data_ptr()
    launch(
        x.device,
        FEW_SOURCE,
        f"sddmm_few<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}, {batch}>",
        "PqqPqqPPPiiiii",
        (x.data_ptr(), *x.stride(), dy.data_ptr(), *dy.stride(), *entries, m, n, k, nnz, share),
        grid=blocks,
        block=32 * warps,
        shared=batch * k * itemsize,
    )
    return out


def run_tiles(rows: int, dy, x, cols, row_offsets, plan: Plan | None) -> torch.Tensor:
    """The same by slabs that come and go, ``rows`` rows of W a block."""
    (m, n), k = dy.shape, x.shape[1]
    plan = plan or Plan(cols, row_offsets, (n, k), (_WIDTH,), look=False)
    if x.dtype == torch.float32 and torch.cuda.get_device_capability(x.device) == (9, 0):
        x, stride = turned(x)
        of_x = MATRIX.pack(x.data_ptr(), 1, stride, m, k, True)
    else:
        x, of_x = _matrix(x)
    dyt, dyt_stride = _turned(dy)
    out = torch.empty(cols.numel(), dtype=torch.float32, device=x.device)
    slabs = -(-k // _WIDTH)
    arrays = (cols, row_offsets, plan.segments(_WIDTH), plan.parts, plan.first)
    weights = WEIGHTS.pack(*(a.data_ptr() for a in arrays), n, k, plan.most_parts, cols.numel(), slabs, _WIDTH)
    blocks = -(-plan.most_parts // rows)
    stages = min(4, math.floor(shared_budget(x.device.index) / (_WIDTH * _LINE)))
    launch(
        x.device,
        SOURCE,
        f"sddmm_tiles<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}>",
        f"{MATRIX.size}sPq{WEIGHTS.size}sPiii",
        (
            of_x,
            dyt.data_ptr(),
            dyt_stride,
            weights,
            out.data_ptr(),
            blocks,
            rows,
            stages,
        ),
        grid=blocks * slabs,
        block=32 * _WARPS,
        shared=stages * _WIDTH * _LINE,
    )
    return out


def run_slabs(choice: Slabs, dy, x, cols, row_offsets, plan: Plan | None) -> torch.Tensor:
    """The same by one choice of slabs."""
    (m, n), k, nnz, itemsize = dy.shape, x.shape[1], cols.numel(), x.element_size()
    (x, of_x), (dyt, dyt_stride) = _matrix(x), _turned(dy)
    arrays, virtual, stride = (0, 0, 0), n, 0
    if choice.slices > 1:
        plan = plan or Plan(cols, row_offsets, (n, k), (_WIDTH,), look=False)
        arrays = tuple(a.data_ptr() for a in (plan.segments(_WIDTH), plan.parts, plan.first))
        stride = plan.most_parts
        virtual = n if plan.splits is False else stride
    ranges, blocks = choice.ranges(m, itemsize), -(-virtual // choice.rows)
    sums = torch.empty((ranges, nnz), dtype=torch.float32, device=x.device)
    sizes = (n, stride, nnz, blocks, choice.rows, choice.slices, choice.width(k), -(-k // _WIDTH), choice.steps)
    entries = cols.data_ptr(), row_offsets.data_ptr()
    launch(
        x.device,
        SLAB_SOURCE,
        f"sddmm_slab<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}, {_lane(itemsize)}>",
        f"{MATRIX.size}sPqPPPPPPiiiiiiiii",
        (of_x, dyt.data_ptr(), dyt_stride, *entries, *arrays, sums.data_ptr(), *sizes),
        grid=blocks * choice.slices * ranges,
        block=32 * _SLAB_WARPS,
        shared=choice.shared(k),
    )
    if ranges == 1:
        return sums[0]
    out = torch.empty(nnz, dtype=torch.float32, device=x.device)
    arguments = (sums.data_ptr(), out.data_ptr(), nnz, ranges)
    launch(x.device, SLAB_SOURCE, "sddmm_sum", "PPii", arguments, grid=-(-nnz // _SUM_BLOCK), block=_SUM_BLOCK)
    return out


def _matrix(x) -> tuple[torch.Tensor, bytes]:
    """What holds x, and how kernels take it."""
    x, k_major, stride = matrix(x)
    steps = (stride, 1) if k_major else (1, stride)
    return x, MATRIX.pack(x.data_ptr(), *steps, *x.shape, wide(x, k_major, stride))


def _turned(dy) -> tuple[torch.Tensor, int]:
    """What holds dy (M, N) turned, rows of whole 16 bytes with zeros beyond M, and how far apart they are."""
    m, n = dy.shape
    if dy.dtype == torch.float32 and torch.cuda.get_device_capability(dy.device) == (9, 0):
        return turned(dy if dy.stride(0) != 1 or dy.stride(1) == m else dy.contiguous())  # no gaps
    vector = 16 // dy.element_size()
    make = torch.zeros if m % vector else torch.empty
    dyt = make((n, -(-m // vector) * vector), dtype=dy.dtype, device=dy.device)
    dyt[:, :m].copy_(dy.t())
    return dyt, dyt.shape[1]
