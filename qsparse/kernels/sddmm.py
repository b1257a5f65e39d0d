"""The product of two dense matrices at the entries of a sparse one: the gradient of sparse weights."""

from __future__ import annotations

import torch

from qsparse.kernels import _sddmm_sm80, _spmm, _spmm_sm80
from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face, rows
from qsparse.kernels._load import launch

_SIMT_SOURCE = "sddmm.cu"
_WARPS, _BLOCK = 8, 256
_CPU_PRODUCTS = 2**24  # held at once

SOURCES = {
    _SIMT_SOURCE: tuple(f"sddmm_rows<{c_type}>" for c_type in C_FLOATS.values()),
    **_sddmm_sm80.instances(),
}


@face(SOURCES)
def sddmm(dy, x, col_indices, row_offsets, *, check: bool = True, plan=None):
    """``(dy.T @ x)[n, k]`` for the entries ``(n, k)`` of a CSR pattern: no dense matrix is ever made.

    With ``y = x @ W.T`` this is the gradient of W's stored values.

    Parameters
    ----------
    dy : (M, N) float32, float16 or bfloat16, any strides
    x : (M, K), dtype of ``dy``, any strides
    col_indices : (nnz,) int32, or uint16 for K up to 65,536: the column of each entry, row after row
    row_offsets : (N + 1,) int32
    check : bool
        Look at every index first (on a GPU this waits for the device). Pass False only for arrays checked before.
    plan : what ``spmm_csr.plan`` returned for these very arrays, optional

    Returns
    -------
    (nnz,), dtype of ``dy``; sums over the batch are held in float32, in the same order every run.

    Duplicates get the same gradient each. Raises TypeError for a wrong dtype; ValueError for shapes that do not fit,
    for more than 2^31 - 2^14 entries, for a plan of other arrays, and with ``check`` for a bad index.

    Source: the sampled dense-dense product of I. Nisa et al., "Sampled dense matrix multiplication for high-performance
    machine learning" (HiPC 2018): lines of x reused from shared memory, a row of dy from registers.
    """
    if torch.compiler.is_compiling():
        return _operator(dy, x, col_indices, row_offsets, check)
    check_tensor("dy", dy, tuple(C_FLOATS), (None, None))
    check_tensor("x", x, (dy.dtype,), (dy.shape[0], None))
    check_tensor("col_indices", col_indices, tuple(_spmm_sm80.INDICES), (None,))
    check_same_device(dy, x=x, col_indices=col_indices)
    n, k = _spmm.check_shape((dy.shape[1], x.shape[1]), x.shape[1]), x.shape[1]
    _spmm.check_pattern(col_indices, row_offsets, (n, k), check)
    _spmm.check_plan(plan, col_indices, row_offsets, (n, k))
    col_indices, row_offsets = rows(col_indices), rows(row_offsets)
    if not len(dy) or not col_indices.numel():
        return dy.new_zeros(col_indices.numel())
    if dy.device.type == "cpu":
        return _cpu(dy, x, col_indices.long(), row_offsets)
    if _spmm.has_sm80(dy.device):
        return _sddmm_sm80.sddmm(dy, x, col_indices, row_offsets, plan).to(dy.dtype)
    return _simt(dy, x, col_indices.int(), row_offsets).to(dy.dtype)


def _simt(dy, x, cols, row_offsets) -> torch.Tensor:
    m, n = dy.shape
    dyt, xt = rows(dy.t()), rows(x.t())
    out = torch.empty(cols.numel(), dtype=torch.float32, device=dy.device)
    arguments = (*(a.data_ptr() for a in (dyt, xt, cols, row_offsets, out)), m, n)
    instance = f"sddmm_rows<{C_FLOATS[dy.dtype]}>"
    launch(dy.device, _SIMT_SOURCE, instance, "PPPPPqq", arguments, grid=-(-n // _WARPS), block=_BLOCK)
    return out


def _cpu(dy, x, cols, row_offsets) -> torch.Tensor:
    entries = torch.repeat_interleave(torch.arange(dy.shape[1]), row_offsets.diff())
    dyt, xt = dy.t().float().contiguous(), x.t().float().contiguous()
    step = max(1, _CPU_PRODUCTS // len(dy))
    sums = [(dyt[entries[at : at + step]] * xt[cols[at : at + step]]).sum(dim=1) for at in range(0, len(entries), step)]
    return torch.cat(sums).to(dy.dtype)


@torch.library.custom_op("qsparse::sddmm", mutates_args=())
def _operator(
    dy: torch.Tensor, x: torch.Tensor, col_indices: torch.Tensor, row_offsets: torch.Tensor, check: bool
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return sddmm(dy, x, col_indices, row_offsets, check=check)


@_operator.register_fake
def _(dy, x, col_indices, row_offsets, check):
    return dy.new_empty(col_indices.shape[0])
