"""Sparse weights in CSR times dense activations."""

from __future__ import annotations

import torch

from qsparse.kernels import _spmm
from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face, rows

SOURCES = {"spmm_csr.cu": _spmm.instances("spmm_csr")}


@face(SOURCES)
def spmm_csr(x, values, col_indices, row_offsets, bias=None, *, shape, relu: bool = False, check: bool = True):
    """``y = act(x @ W.T + bias)`` with ``W (N, K)`` in CSR.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides
    values : (nnz,), dtype of ``x``
        Stored entries of W, row after row. Duplicates within a row are summed.
    col_indices : (nnz,) int32, the column of each entry, in any order within a row
    row_offsets : (N + 1,) int32
        Row ``n`` holds the entries ``row_offsets[n]`` up to, not including, ``row_offsets[n + 1]``.
    bias : (N,), dtype of ``x``, optional
    shape : (N, K)
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    check : bool
        Look at every index first (on a GPU this waits for the device). Pass False only for arrays checked before:
        a bad index then reads out of bounds.

    Returns
    -------
    (M, N), dtype of ``x``, row-major; sums are held in float32.

    An entry that is not stored contributes nothing, whatever ``x`` holds there, NaN and Inf included. Raises
    TypeError for a wrong dtype; ValueError for shapes that do not fit, and with ``check`` for a column outside
    [0, K) or offsets that do not rise from 0 to nnz, naming the entry.

    Source: the compressed-row product, one warp a row, of N. Bell, M. Garland, "Implementing sparse matrix-vector
    multiplication on throughput-oriented processors" (SC 2009).
    """
    if torch.compiler.is_compiling():
        return _operator(x, values, col_indices, row_offsets, bias, list(shape), relu, check)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    n = _spmm.check_shape(shape, x.shape[1])
    check_tensor("values", values, (x.dtype,), (None,))
    check_tensor("col_indices", col_indices, (torch.int32,), (values.numel(),))
    check_tensor("row_offsets", row_offsets, (torch.int32,), (n + 1,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_same_device(x, values=values, col_indices=col_indices, row_offsets=row_offsets, bias=bias)
    if check:
        _check_offsets(row_offsets, values.numel())
        _spmm.check_indices("col_indices", col_indices, shape[1])
    values, col_indices, row_offsets = rows(values), rows(col_indices), rows(row_offsets)
    if x.device.type == "cpu":
        return _spmm.cpu(x, torch.sparse_csr, (row_offsets, col_indices), values, shape, bias, relu)
    entries = (values.data_ptr(), col_indices.data_ptr(), row_offsets.data_ptr())
    return _spmm.spmm("spmm_csr", x, entries, "PPP", bias, n, relu)


@torch.library.custom_op("qsparse::spmm_csr", mutates_args=())
def _operator(
    x: torch.Tensor,
    values: torch.Tensor,
    col_indices: torch.Tensor,
    row_offsets: torch.Tensor,
    bias: torch.Tensor | None,
    shape: list[int],
    relu: bool,
    check: bool,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return spmm_csr(x, values, col_indices, row_offsets, bias, shape=shape, relu=relu, check=check)


@_operator.register_fake
def _(x, values, col_indices, row_offsets, bias, shape, relu, check):
    return x.new_empty((x.shape[0], shape[0]))


def _check_offsets(row_offsets, nnz: int) -> None:
    if int(row_offsets[0]) != 0 or int(row_offsets[-1]) != nnz:
        ends = int(row_offsets[0]), int(row_offsets[-1])
        raise ValueError(f"row_offsets must go from 0 to nnz = {nnz}, got {ends[0]} to {ends[1]}")
    falls = row_offsets[1:] < row_offsets[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0]) + 1
        raise ValueError(f"row_offsets[{at}] is {int(row_offsets[at])}, below row_offsets[{at - 1}]")
