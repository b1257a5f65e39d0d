"""The host side of ``spmm_csr_expand_sm90.cu``: products on the tensor cores, with W made dense for the call.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import math

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch, multiprocessors
from qsparse.kernels.gemm import gemm

SOURCE = "spmm_csr_expand_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_WARPS, _BLOCK, _REPAIR_BLOCK, _REPAIR_BLOCKS = 4, 128, 256, 8


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    return tuple(
        f"spmm_csr_{part}<{c_type}, {index}>"
        for part in ("expand", "repair")
        for c_type in C_FLOATS.values()
        for index in _INDICES.values()
    )


def time(dtype: torch.dtype, m: int, n: int, k: int) -> float:
    """µs on an H200 of writing W out and multiplying, the second in float32 as "highest" does."""
    if n * k >= 2**31:
        return math.inf
    if dtype == torch.float32:
        return 31 + (m + n) * k * 5.6e-6 + m * n * k / 1.28e8
    return 15 + n * k * 2 / 2.5e6 + m * n * k / 2.5e8


def pays(dtype: torch.dtype, m: int, n: int, k: int, nnz: int) -> bool:
    """Whether writing and multiplying a dense W of halves takes less time than tiles that go through the entries."""
    return time(dtype, m, n, k) < 18 + n * k / 4e5 + m * nnz / 4e6


def spmm(x, values, cols, row_offsets, bias, n: int, relu: bool) -> torch.Tensor:
    """``act(x @ W.T + bias)``, row-major; float32 as ``gemm`` does with ``precision="highest"``."""
    (m, k), device = x.shape, x.device
    vector = 16 // x.element_size()
    stride = -(-k // vector) * vector
    w = torch.empty((n, stride), dtype=x.dtype, device=device)
    entries = (values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr())
    types = f"<{C_FLOATS[x.dtype]}, {_INDICES[cols.dtype]}>"
    arguments = (*entries, w.data_ptr(), n, k, stride)
    launch(device, SOURCE, f"spmm_csr_expand{types}", "PPPPqqq", arguments, grid=-(-n // _WARPS), block=_BLOCK)
    y = gemm(x, w[:, :k], bias, relu=relu, precision="highest" if x.dtype == torch.float32 else "ieee")
    grid = min(_REPAIR_BLOCKS * multiprocessors(device.index)[1], -(-m * n // (vector * _REPAIR_BLOCK)))
    bias_address = 0 if bias is None else bias.data_ptr()
    arguments = (y.data_ptr(), x.data_ptr(), *x.stride(), *entries, bias_address, m, n, relu)
    launch(device, SOURCE, f"spmm_csr_repair{types}", "PPqqPPPPqqi", arguments, grid=grid, block=_REPAIR_BLOCK)
    return y
