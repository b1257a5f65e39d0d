"""The host side of ``sddmm_sm80.cu``. The face of the operation is :mod:`qsparse.kernels.sddmm`."""

from __future__ import annotations

import functools
import math

import torch

from qsparse.kernels._face import C_FLOATS, matrix
from qsparse.kernels._load import launch, multiprocessors
from qsparse.kernels._spmm_groups_sm90 import turned
from qsparse.kernels._spmm_sm80 import INDICES, MATRIX, WEIGHTS, Plan, shared_budget, wide

SOURCE = "sddmm_sm80.cu"
_WIDTH = 128  # columns of a slab
_CONSUMERS, _WARPS = 12, 16
_MOST_ROWS = 192
_LINE = 512  # bytes of a column's batch rows in a slab


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    return tuple(f"sddmm_tiles<{value}, {index}>" for value in C_FLOATS.values() for index in INDICES.values())


@functools.lru_cache(maxsize=4096)
def block_rows(n: int, k: int, nnz: int, processors: int) -> int:
    """The rows of W a block with the fewest clocks: for its entries, or for its slabs' way from the L2 cache."""

    def clocks(rows: int) -> float:
        waves = -(-(-(-n // rows) * -(-k // _WIDTH)) // processors)
        return waves * max(rows * (nnz / n / k * min(k, _WIDTH) * 6.5 + 10), min(k, _WIDTH) * 13)

    return min(range(min(n, _MOST_ROWS), 0, -1), key=clocks)


def sddmm(dy, x, cols, row_offsets, plan: Plan | None) -> torch.Tensor:
    """The (nnz,) float32 sums of ``dy[:, n] * x[:, k]`` over the batch, of arrays that are checked."""
    (m, n), k, itemsize = dy.shape, x.shape[1], x.element_size()
    plan = plan or Plan(cols, row_offsets, (n, k), (_WIDTH,), look=False)
    if x.dtype == torch.float32 and torch.cuda.get_device_capability(x.device) == (9, 0):
        xt, stride = turned(x)
        dyt, dyt_stride = turned(dy if dy.stride(0) != 1 or dy.stride(1) == m else dy.contiguous())  # no gaps
        of_x = xt.data_ptr(), 1, stride, m, k, True
    else:
        x, k_major, stride = matrix(x)
        of_x = x.data_ptr(), *((stride, 1) if k_major else (1, stride)), m, k, wide(x, k_major, stride)
        vector = 16 // itemsize
        dyt = torch.zeros if m % vector else torch.empty
        dyt = dyt((n, -(-m // vector) * vector), dtype=dy.dtype, device=dy.device)
        dyt[:, :m].copy_(dy.t())
        dyt_stride = dyt.shape[1]
    out = torch.empty(cols.numel(), dtype=torch.float32, device=x.device)
    slabs = -(-k // _WIDTH)
    arrays = (cols, row_offsets, plan.segments(_WIDTH), plan.parts, plan.first)
    weights = WEIGHTS.pack(*(a.data_ptr() for a in arrays), n, k, plan.most_parts, cols.numel(), slabs, _WIDTH)
    rows = block_rows(n, k, cols.numel(), multiprocessors(x.device.index)[1])
    blocks = -(-plan.most_parts // rows)
    stages = min(4, math.floor(shared_budget(x.device.index) / (_WIDTH * _LINE)))
    launch(
        x.device,
        SOURCE,
        f"sddmm_tiles<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}>",
        f"{MATRIX.size}sPq{WEIGHTS.size}sPiii",
        (
            MATRIX.pack(*of_x),
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
