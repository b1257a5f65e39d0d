"""Sparse weights in CSR times dense activations."""

from __future__ import annotations

import torch

from qsparse.kernels import (
    _spmm,
    _spmm_expand_sm90,
    _spmm_few_sm80,
    _spmm_groups_sm90,
    _spmm_product_sm90,
    _spmm_slab_sm90,
    _spmm_sm80,
    _spmm_tall_sm90,
    _spmm_whole_sm90,
)
from qsparse.kernels._face import C_FLOATS, check_choice, check_same_device, check_tensor, face, rows

SOURCES = {
    "spmm_csr.cu": _spmm.simt_instances("spmm_csr"),
    **_spmm_sm80.instances(),
    _spmm_groups_sm90.SOURCE: _spmm_groups_sm90.instances(),
    _spmm_slab_sm90.SOURCE: _spmm_slab_sm90.instances(),
    _spmm_tall_sm90.SOURCE: _spmm_tall_sm90.instances(),
    _spmm_whole_sm90.SOURCE: _spmm_whole_sm90.instances(),
    _spmm_expand_sm90.SOURCE: _spmm_expand_sm90.instances(),
    _spmm_few_sm80.SOURCE: _spmm_few_sm80.instances(),
    _spmm_product_sm90.SOURCE: _spmm_product_sm90.instances(),
}


@face(SOURCES)
def spmm_csr(
    x,
    values,
    col_indices,
    row_offsets,
    bias=None,
    *,
    shape,
    relu: bool = False,
    check: bool = True,
    columns: bool = False,
    plan=None,
    precision: str = "ieee",
):
    """``y = act(x @ W.T + bias)`` with ``W (N, K)`` in CSR.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides; rows or columns that are contiguous are not copied
    values : (nnz,), dtype of ``x``
        Stored entries of W, row after row. Duplicates within a row are summed.
    col_indices : (nnz,) int32, or uint16 for K up to 65,536
        The column of each entry, in any order within a row; rows that do not ascend are slow.
    row_offsets : (N + 1,) int32
        Row ``n`` holds the entries ``row_offsets[n]`` up to, not including, ``row_offsets[n + 1]``.
    bias : (N,), dtype of ``x``, optional
    shape : (N, K)
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    check : bool
        Look at every index first (on a GPU this waits for the device). Pass False only for arrays checked before:
        a bad index then reads out of bounds.
    columns : bool
        Return y column-major. With ``x = X.t()``, the result's ``.t()`` is ``W @ X``, row-major, and X is not copied.
    plan : what ``spmm_csr.plan(col_indices, row_offsets, shape=(N, K))`` returned for these very arrays, optional
        Saves looking at the pattern at each call, on a GPU, and lets tensor cores multiply up to 64 rows of halves,
        for which the first such call looks at it once more, and waits. Values may change.
    precision : str
        How float32 is multiplied. "ieee": by float32 multiply-adds. "highest": on the tensor cores of a Hopper card,
        W written out for the call, as ``gemm`` does with this name, where that takes less time; "ieee" elsewhere.
        Where W is so dense that going through its entries takes longer, "ieee" on a Hopper card writes W out too, and
        multiplies it as ``gemm`` does.

    Returns
    -------
    (M, N), dtype of ``x``, row-major unless ``columns``; sums are held in float32, in the same order every run.

    Where W is written out, as for most products of halves on a Hopper card, N * K elements of memory are held for the
    call; where a plan is followed there, W's entries in its order, at least 8 bytes each. An entry that is not stored
    contributes nothing all the same, whatever ``x`` holds there, NaN and Inf included.

    Raises TypeError for a wrong dtype; ValueError for shapes that do not fit, for more than 2^31 - 2^14 entries, for a
    plan of other arrays, and with ``check`` for a column outside [0, K) or offsets that do not rise from 0 to nnz,
    naming the entry.

    Source: a row's sums in registers over tiles of x, after T. Gale, M. Zaharia, C. Young, E. Elsen, "Sparse GPU
    kernels for deep learning" (SC 2020); a warp a row for small batches, after N. Bell, M. Garland, "Implementing
    sparse matrix-vector multiplication on throughput-oriented processors" (SC 2009).
    """
    if torch.compiler.is_compiling():  # a plan is no tensor: the operator goes without
        return _operator(x, values, col_indices, row_offsets, bias, list(shape), relu, check, columns, precision)
    check_choice("precision", precision, ("ieee", "highest"))
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    shape = n, _ = _spmm.check_shape(shape, x.shape[1]), x.shape[1]
    _spmm.check_csr(x, values, col_indices, row_offsets, shape, check)
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_same_device(x, bias=bias)
    _spmm.check_plan(plan, col_indices, row_offsets, shape)
    values, col_indices, row_offsets = rows(values), rows(col_indices), rows(row_offsets)
    if x.device.type == "cpu":
        y = _spmm.cpu(x, torch.sparse_csr, (row_offsets, col_indices.int()), values, shape, bias, relu)
        return rows(y.t()).t() if columns else y
    if _spmm.has_sm80(x.device):
        bias = None if bias is None else rows(bias)
        division = _spmm_few_sm80.choose(x, n, values.numel()) if plan and not columns else None
        if division and (found := _spmm_few_sm80.kept(plan)):
            return _spmm_few_sm80.spmm(division, x, values, col_indices, row_offsets, bias, n, relu, found)
        return _spmm_sm80.spmm(x, values, col_indices, row_offsets, bias, n, relu, columns, plan, precision == "ieee")
    col_indices = col_indices.int()
    entries = (values.data_ptr(), col_indices.data_ptr(), row_offsets.data_ptr())
    y = _spmm.simt("spmm_csr", x, entries, "PPP", bias, n, relu)
    return rows(y.t()).t() if columns else y


def plan(col_indices, row_offsets, *, shape):
    """What ``spmm_csr`` finds out about a pattern, kept for later calls; None where it is of no use (on a CPU).

    Parameters
    ----------
    col_indices : (nnz,) int32 or uint16 tensor, as ``spmm_csr`` takes it
    row_offsets : (N + 1,) int32 tensor
    shape : (N, K)

    Returns
    -------
    An argument ``plan`` of ``spmm_csr`` and of ``sddmm`` for these very arrays, which it keeps: some dozens of bytes an
    entry, and on a Hopper card as many for each 8 rows x 64 columns of W, however few entries these have.

    Every index is looked at, and on a GPU that waits for the device. Raises TypeError for a wrong dtype or sizes that
    are no whole numbers, ValueError for shapes that do not fit, for more than 2^31 - 2^14 entries and for a bad index,
    naming the entry.
    """
    n, k = _spmm.check_sizes(shape)
    _spmm.check_pattern(col_indices, row_offsets, (n, k), check=True)
    if col_indices.device.type == "cpu" or not _spmm.has_sm80(col_indices.device):
        return None
    found = _spmm_sm80.Plan(col_indices, row_offsets, (n, k))
    if torch.cuda.get_device_capability(col_indices.device) == (9, 0) and found.nnz:
        found.groups = _spmm_groups_sm90.Plan(found.cols, found.row_offsets, (n, k))
        if not found.groups.joins:
            found.tall = _spmm_tall_sm90.plan(found.cols, found.row_offsets, (n, k))
    torch.cuda.current_stream(col_indices.device).synchronize()  # it is there for every stream
    return found


spmm_csr.plan = plan


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
    columns: bool,
    precision: str,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    options = {"shape": shape, "relu": relu, "check": check, "columns": columns, "precision": precision}
    return spmm_csr(x, values, col_indices, row_offsets, bias, **options)


@_operator.register_fake
def _(x, values, col_indices, row_offsets, bias, shape, relu, check, columns, precision):
    m, n = x.shape[0], shape[0]
    return x.new_empty((n, m)).t() if columns else x.new_empty((m, n))
