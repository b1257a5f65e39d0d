"""The host side of ``spmm_entries_sm80.cu``: which products it takes, and the launch.

The face of the operation is :mod:`qsparse.kernels.spmm_entries`.
"""

from __future__ import annotations

import itertools

import torch

from qsparse.kernels import _weight_tiles_sm80 as tiles
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._gemm_sm80 import limits
from qsparse.kernels._load import launch

SOURCE = "spmm_entries_sm80.cu"
DTYPES = (torch.float16, torch.bfloat16)
DIVISIONS = tuple(tiles.Division(batch, warps) for batch, warps in ((8, 32), (16, 16), (32, 16), (32, 8)))
INSTANCES = tuple(
    f"spmm_entries_sm80<{C_FLOATS[dtype]}, {C_FLOATS[out]}, {each.batch}, {each.warps}>"
    for dtype, each in itertools.product(DTYPES, DIVISIONS)
    for out in (dtype, torch.float32)
)


def choose(x: torch.Tensor, n: int) -> tiles.Division | None:
    """How a product of few rows is divided; None where W is to be written out."""
    m, k = x.shape
    if not 0 < m <= tiles.FEW_ROWS or min(n, k) == 0 or max(n, k) >= 2**30:
        return None
    return tiles.choose(m, n, k, DIVISIONS, *limits(x.device.index))


def launch_few(division: tiles.Division, x, entries, offsets, bias, y, relu: bool) -> None:
    """``y = act(x @ W.T + bias)`` into ``y`` (M, N) row-major, dtype of ``x`` or float32.

    ``x`` (M, K) has contiguous rows; the other arrays are contiguous, ``entries`` on 16 bytes.
    """
    (m, k), n = x.shape, y.shape[1]
    x = tiles.aligned(x)
    bias_address = 0 if bias is None else bias.data_ptr()
    operands = (x.data_ptr(), x.stride(0), entries.data_ptr(), offsets.data_ptr(), bias_address, y.data_ptr())
    launch(
        x.device,
        SOURCE,
        f"spmm_entries_sm80<{C_FLOATS[x.dtype]}, {C_FLOATS[y.dtype]}, {division.batch}, {division.warps}>",
        "PqPPPPiiiiii",
        (*operands, m, n, k, relu, tiles.grid((n, k))[0], division.share(k)),
        grid=division.blocks(m, n),
        block=32 * division.warps,
        shared=division.shared,
    )
