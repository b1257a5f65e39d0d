"""Sparse weights in tiles of entries times dense activations, on tensor cores."""

from __future__ import annotations

import torch

from qsparse.kernels import _entry_tiles, _spmm, _spmm_entries_sm80, _spmm_entries_sm90, _weight_tiles_sm80
from qsparse.kernels._face import check_dtype, check_same_device, check_tensor, face, matrix, pick_tier, rows
from qsparse.kernels._load import launch, multiprocessors
from qsparse.kernels.gemm import gemm

_DENSE, _BLOCK = "spmm_entries.cu", 128
SOURCES = {
    _DENSE: ("spmm_entries_dense",),
    _spmm_entries_sm80.SOURCE: _spmm_entries_sm80.INSTANCES,
    _spmm_entries_sm90.SOURCE: _spmm_entries_sm90.INSTANCES,
}


@face(SOURCES)
def spmm_entries(
    x,
    entries,
    offsets,
    bias=None,
    *,
    shape,
    relu: bool = False,
    out_dtype=None,
    check: bool = True,
    tier: str | None = None,
):
    """``y = act(x @ W.T + bias)`` with ``W (N, K)`` in tiles of entries, of ``qsparse.sparse.to_entry_tiles``.

    Parameters
    ----------
    x : (M, K) float16 or bfloat16, any strides
    entries : (4 * offsets[-1],) int32
        The stored entries of W, each the bits of a value of the dtype of ``x`` and its place in a tile of 32 x 64.
    offsets : (tiles + 1,) int32
        Where a tile's entries start, in units of 4.
    bias : (N,), dtype of ``x``, optional
    shape : (N, K)
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : dtype of ``x`` (the default), or float32
    check : bool
        Look at every offset and place first (on a GPU this waits for the device). Pass False only for arrays checked
        before, or made by ``to_entry_tiles``: wrong ones are then read and written out of bounds.
    tier : str, optional
        "simt", "sm80" or "sm90": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major; sums are held in float32, in the same order every run, and rounded once.

    Up to 64 rows of x meet the stored weights themselves, which are put into shared memory as the tensor cores want
    them. For more rows, and on cards before 8.0, W is written out densely, into N * K elements of memory held for the
    call alone, and :func:`qsparse.kernels.gemm` multiplies.

    Unlike CSR and COO, where what is not stored contributes nothing, a weight that is not stored is multiplied as a
    zero: where a row of ``x`` holds NaN or Inf, none of its outputs is finite. Raises TypeError for a wrong dtype;
    ValueError for shapes that do not fit, and with ``check`` for offsets and entries that do not fit each other.

    Source: sparse in memory and dense when multiplied, after H. Xia et al., "Flash-LLM: Enabling Cost-Effective and
    Highly-Efficient Large Generative Model Inference with Unstructured Sparsity" (VLDB 2023), whose entries come with
    their places too.
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, entries, offsets, bias, list(shape), relu, out_dtype or x.dtype, check)
    check_tensor("x", x, _spmm_entries_sm80.DTYPES, (None, None))
    m, k = x.shape
    n = _spmm.check_shape(shape, k)
    tall, wide = _weight_tiles_sm80.grid((n, k))
    check_tensor("entries", entries, (torch.int32,), (None,))
    check_tensor("offsets", offsets, (torch.int32,), (tall * wide + 1,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, (x.dtype, torch.float32))
    check_same_device(x, entries=entries, offsets=offsets, bias=bias)
    if check:
        _entry_tiles.check(entries, offsets, (n, k))
    entries, offsets = rows(entries), rows(offsets)
    if x.device.type == "cpu":
        pick_tier(tier, (), x.device)
        w = _entry_tiles.unpack(entries, offsets, (n, k), x.dtype)
        return gemm(x, w, bias, relu=relu, out_dtype=out_dtype)

    best = spmm_entries.tier(x.device)
    split = _spmm_entries_sm90.choose(m, n, k, multiprocessors(x.device.index)[1]) if best == "sm90" else None
    possible = [*(["sm90"] if split else []), *([] if best == "simt" else ["sm80"]), "simt"]
    taken = pick_tier(tier, possible, x.device)
    bias = None if bias is None else rows(bias)
    entries = entries if entries.data_ptr() % 16 == 0 else entries.clone()
    division = _spmm_entries_sm80.choose(x, n) if taken == "sm80" else None
    if taken == "sm90" or division:
        x, y = matrix(x, k_major=True)[0], torch.empty((m, n), dtype=out_dtype, device=x.device)
        if taken == "sm90":
            _spmm_entries_sm90.launch_some(split, x, entries, offsets, bias, y, relu)
        else:
            _spmm_entries_sm80.launch_few(division, x, entries, offsets, bias, y, relu)
        return y
    return gemm(x, _dense(entries, offsets, (n, k), x.dtype), bias, relu=relu, out_dtype=out_dtype)


def _dense(entries, offsets, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """``W (N, K)``, its rows on 16 bytes, of checked tiles on a GPU."""
    (n, k), (_, wide) = shape, _weight_tiles_sm80.grid(shape)
    out = torch.empty((n, -(-k // 8) * 8), dtype=dtype, device=entries.device)
    launch(
        entries.device,
        _DENSE,
        "spmm_entries_dense",
        "PPPqii",
        (entries.data_ptr(), offsets.data_ptr(), out.data_ptr(), out.shape[1], n, wide),
        grid=offsets.numel() - 1,
        block=_BLOCK,
    )
    return out[:, :k]


@torch.library.custom_op("qsparse::spmm_entries", mutates_args=())
def _operator(
    x: torch.Tensor,
    entries: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    shape: list[int],
    relu: bool,
    out_dtype: torch.dtype,
    check: bool,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    options = {"shape": shape, "relu": relu, "out_dtype": out_dtype, "check": check}
    return spmm_entries(x, entries, offsets, bias, **options)


@_operator.register_fake
def _(x, entries, offsets, bias, shape, relu, out_dtype, check):
    return x.new_empty((x.shape[0], shape[0]), dtype=out_dtype)
