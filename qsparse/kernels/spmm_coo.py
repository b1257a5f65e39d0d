"""Sparse weights in COO times dense activations."""

from __future__ import annotations

import torch

from qsparse.kernels import _spmm, _spmm_sm80
from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face
from qsparse.kernels._face import rows as row_major

SOURCES = {"spmm_coo.cu": _spmm.simt_instances("spmm_coo")}


@face(SOURCES)
def spmm_coo(x, values, rows, cols, bias=None, *, shape, relu: bool = False, check: bool = True, ordered: bool = False):
    """``y = act(x @ W.T + bias)`` with ``W (N, K)`` in COO.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides
    values : (nnz,), dtype of ``x``
        Stored entries of W, in any order. Duplicates are summed.
    rows, cols : (nnz,) int32, the place of each entry
    bias : (N,), dtype of ``x``, optional
    shape : (N, K)
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    check : bool
        Look at every index first (on a GPU this waits for the device). Pass False only for arrays checked before:
        a bad index then reads out of bounds.
    ordered : bool
        The caller promises ascending ``rows``, which saves sorting them here. On a GPU a row's ``cols`` should ascend
        too: otherwise it is right, but slow.

    Returns
    -------
    (M, N), dtype of ``x``, row-major; sums are held in float32, in the same order every run.

    An entry that is not stored contributes nothing, whatever ``x`` holds there, NaN and Inf included. Raises
    TypeError for a wrong dtype; ValueError for shapes that do not fit, for more than 2^31 - 2^14 entries, and with
    ``check`` for an index outside W, naming the entry.

    Source: sorted, the entries are multiplied as :func:`spmm_csr` does from compute capability 8.0 on; before, a warp a
    row, after N. Bell, M. Garland, "Implementing sparse matrix-vector multiplication on throughput-oriented processors"
    (SC 2009).
    """
    if torch.compiler.is_compiling():
        return _operator(x, values, rows, cols, bias, list(shape), relu, check, ordered)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    shape = n, k = _spmm.check_shape(shape, x.shape[1]), x.shape[1]
    check_tensor("values", values, (x.dtype,), (None,))
    nnz = values.numel()
    _spmm.check_count(nnz)
    check_tensor("rows", rows, (torch.int32,), (nnz,))
    check_tensor("cols", cols, (torch.int32,), (nnz,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_same_device(x, values=values, rows=rows, cols=cols, bias=bias)
    if check:
        _spmm.check_indices("rows", rows, n)
        _spmm.check_indices("cols", cols, k)
    if not ordered:
        values, rows, cols = _spmm.sort_entries(values, rows, cols, k, x.device.type == "cuda")
    values, rows, cols = row_major(values), row_major(rows), row_major(cols)
    if x.device.type == "cpu":
        return _spmm.cpu(x, torch.sparse_coo, (rows, cols), values, shape, bias, relu)
    if _spmm.has_sm80(x.device):  # by CSR, whose kernels are faster
        offsets = torch.searchsorted(rows, torch.arange(n + 1, dtype=torch.int32, device=rows.device)).int()
        bias = None if bias is None else row_major(bias)
        return _spmm_sm80.spmm(x, values, cols, offsets, bias, n, relu, columns=False, plan=None)
    entries = (values.data_ptr(), cols.data_ptr(), rows.data_ptr(), nnz)
    return _spmm.simt("spmm_coo", x, entries, "PPPq", bias, n, relu)


@torch.library.custom_op("qsparse::spmm_coo", mutates_args=())
def _operator(
    x: torch.Tensor,
    values: torch.Tensor,
    rows: torch.Tensor,
    cols: torch.Tensor,
    bias: torch.Tensor | None,
    shape: list[int],
    relu: bool,
    check: bool,
    ordered: bool,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return spmm_coo(x, values, rows, cols, bias, shape=shape, relu=relu, check=check, ordered=ordered)


@_operator.register_fake
def _(x, values, rows, cols, bias, shape, relu, check, ordered):
    return x.new_empty((x.shape[0], shape[0]))
