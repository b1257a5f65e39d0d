"""The host side of ``spmm_csr_expand_sm90.cu``: dense products, with W made dense for the call.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import math

import torch

from qsparse.kernels import _gemm_simt, _spmm_product_sm90
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch, multiprocessors
from qsparse.kernels.gemm import gemm

SOURCE = "spmm_csr_expand_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_WARPS, _BLOCKS, _REPAIR_BLOCK, _REPAIR_BLOCKS = 4, 4, 256, 8  # a block's, a multiprocessor's
_MOST_WIDTH, _STEP = 32768, 2048  # bytes of a row that a warp expands at once; what they are rounded up to
_SHARED, _RESERVED = 227 * 1024, 1024  # a multiprocessor's, and of it for each block
_LOOKERS = 2  # blocks of a multiprocessor that look at x
_PROCESSORS = 132  # of an H200


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    return tuple(
        f"spmm_csr_{part}<{c_type}, {index}>"
        for part in ("expand", "repair")
        for c_type in C_FLOATS.values()
        for index in _INDICES.values()
    )


def time(dtype: torch.dtype, m: int, n: int, k: int, ieee: bool = False, nnz: int = 0) -> float:
    """µs on an H200 of writing W out and multiplying, the second in float32 as "highest" does, or with ``ieee``."""
    if n * k >= 2**31:
        return math.inf
    if ieee:
        cycles = _gemm_simt.estimate(*_gemm_simt.plan(m, n, k, _PROCESSORS), m, n, k, _PROCESSORS)
        return 16 + (n * k + m * (k if _looks_at_x(n, k) else n)) * 4 / 2.5e6 + cycles / 1610
    if dtype == torch.float32:
        return 31 + (m + n) * k * 5.6e-6 + m * n * k / 1.28e8
    return 10 + n * k / 1.8e6 + nnz / 4.7e5 + max(m * n * k / 4.3e8, m * (n + k) / 1.4e6)


def pays(dtype: torch.dtype, m: int, n: int, k: int, nnz: int) -> bool:
    """Whether writing and multiplying a dense W of halves takes less time than tiles that go through the entries."""
    return time(dtype, m, n, k, False, nnz) < 18 + n * k / 4e5 + m * nnz / 4e6


def spmm(x, values, cols, row_offsets, bias, n: int, relu: bool, ieee: bool = False) -> torch.Tensor:
    """``act(x @ W.T + bias)``, row-major; float32 as ``gemm`` does with ``precision="highest"``, or "ieee"."""
    (m, k), device = x.shape, x.device
    if _spmm_product_sm90.takes(x, n):
        w = expand(values, cols, row_offsets, (n, k))
        return _spmm_product_sm90.product(x, w, values, cols, row_offsets, bias, n, relu)
    w, found = _expand(values, cols, row_offsets, (n, k), x if _looks_at_x(n, k) and _in_pieces(x) else None)
    y = gemm(x, w, bias, relu=relu, precision="highest" if x.dtype == torch.float32 and not ieee else "ieee")
    entries = (values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr())
    types, vector = _types(values, cols), 16 // x.element_size()
    grid = min(_REPAIR_BLOCKS * multiprocessors(device.index)[1], -(-m * n // (vector * _REPAIR_BLOCK)))
    bias_address = 0 if bias is None else bias.data_ptr()
    blocks = (0, 0) if found is None else (found.data_ptr(), found.numel())
    arguments = (y.data_ptr(), x.data_ptr(), *x.stride(), *entries, bias_address, m, n, relu, *blocks)
    launch(device, SOURCE, f"spmm_csr_repair{types}", "PPqqPPPPqqiPi", arguments, grid=grid, block=_REPAIR_BLOCK)
    return y


def expand(values, cols, row_offsets, shape: tuple[int, int]) -> torch.Tensor:
    """W (N, K), its rows on 16 bytes; a row in which a column repeats has a NaN."""
    return _expand(values, cols, row_offsets, shape, None)[0]


def _expand(values, cols, row_offsets, shape: tuple[int, int], x) -> tuple[torch.Tensor, torch.Tensor | None]:
    """W, and for each block whether it found what is not finite in ``x``, or a column that repeats (without x None)."""
    (n, k), itemsize, device = shape, values.element_size(), values.device
    stride = -(-k * itemsize // 16) * 16 // itemsize
    w = torch.empty((n, stride), dtype=values.dtype, device=device)
    width = min(-(-stride * itemsize // _STEP) * _STEP, _MOST_WIDTH)
    shared, processors = _WARPS * width, multiprocessors(device.index)[1]
    blocks = min(-(-n // _WARPS), min(_BLOCKS, _SHARED // (shared + _RESERVED)) * processors)
    found, looking = None, (0, 0, 0, 0)
    if x is not None:
        lookers = _LOOKERS * processors
        found = torch.empty(lookers + blocks, dtype=torch.int32, device=device)
        looking = (x.data_ptr(), x.numel() * itemsize // 16, lookers, found.data_ptr())
    entries = (values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr())
    arguments = (*entries, w.data_ptr(), n, stride, width // itemsize, *looking)
    grid, instance = blocks + looking[2], f"spmm_csr_expand{_types(values, cols)}"
    launch(device, SOURCE, instance, "PPPPiiiPqiP", arguments, grid=grid, block=32 * _WARPS, shared=shared)
    return w[:, :k], found


def _looks_at_x(n: int, k: int) -> bool:
    """Whether x is so much smaller than y that looking at it is worth its blocks."""
    return 2 * k <= n


def _in_pieces(x) -> bool:
    """Whether x lies in one piece, of whole 16 bytes."""
    dense = x.is_contiguous() or x.t().is_contiguous()
    return dense and not (x.data_ptr() % 16 or x.numel() * x.element_size() % 16)


def _types(values, cols) -> str:
    return f"<{C_FLOATS[values.dtype]}, {_INDICES[cols.dtype]}>"
