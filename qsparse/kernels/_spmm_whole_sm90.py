"""The host side of ``spmm_csr_whole_sm90.cu``: products on Hopper of a handful of batch rows that fit a block's memory.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch, multiprocessors

SOURCE = "spmm_csr_whole_sm90.cu"
SHARED = 220 * 1024  # bytes that a block may have beside those that the kernel declares itself
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_BATCHES = (1, 4, 8)  # rows of x that a block may hold
_BLOCK = 1024


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    kinds = ((value, index, batch) for value in C_FLOATS.values() for index in _INDICES.values() for batch in _BATCHES)
    return tuple(f"spmm_csr_whole<{value}, {index}, {batch}>" for value, index, batch in kinds)


def _batch(m: int) -> int:
    return next((each for each in _BATCHES if each >= m), _BATCHES[-1])


def takes(x) -> bool:
    """Whether the rows of x consist of whole vectors of 16 bytes and fit a block."""
    (m, k), size = x.shape, x.element_size()
    whole = x.stride(1) == 1 and not (x.data_ptr() % 16 or x.stride(0) * size % 16 or k * size % 16)
    return k > 0 and whole and min(m, _batch(m)) * k * size <= SHARED


def run(x, values, cols, row_offsets, bias, y, relu: bool) -> None:
    """The product, for what `takes` says."""
    (m, k), n = x.shape, y.shape[1]
    batch = _batch(m)
    across = -(-m // batch)
    rows = -(-n // max(1, multiprocessors(x.device.index)[1] // across))
    row_blocks = -(-n // rows)
    entries = values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr()
    bias_address = 0 if bias is None else bias.data_ptr()
    launch(
        x.device,
        SOURCE,
        f"spmm_csr_whole<{C_FLOATS[x.dtype]}, {_INDICES[cols.dtype]}, {batch}>",
        "PqPPPPPqqqiiiii",
        (x.data_ptr(), x.stride(0), *entries, bias_address, y.data_ptr(), *y.stride(), m, n, k, rows, row_blocks, relu),
        grid=row_blocks * across,
        block=_BLOCK,
        shared=min(batch, m) * k * x.element_size(),
    )
