"""Sparse weights in bitmap tiles times dense activations, on tensor cores."""

from __future__ import annotations

import torch

from qsparse.kernels import _bitmap_tiles, _spmm, _spmm_bitmap_sm80, _spmm_product_sm90
from qsparse.kernels._bitmap_tiles import CHUNK, WORDS
from qsparse.kernels._face import C_FLOATS, check_dtype, check_same_device, check_tensor, face, matrix, pick_tier, rows
from qsparse.kernels._load import launch
from qsparse.kernels.gemm import gemm

_DENSE, _BLOCK = "spmm_bitmap.cu", 256
SOURCES = {
    _DENSE: tuple(f"spmm_bitmap_dense<{name}>" for name in C_FLOATS.values()),
    _spmm_bitmap_sm80.SOURCE: _spmm_bitmap_sm80.INSTANCES,
}


@face(SOURCES)
def spmm_bitmap(
    x,
    values,
    masks,
    offsets,
    bias=None,
    *,
    shape,
    relu: bool = False,
    out_dtype=None,
    check: bool = True,
    tier: str | None = None,
):
    """``y = act(x @ W.T + bias)`` with ``W (N, K)`` in bitmap tiles, as ``qsparse.sparse.bitmap_tiles`` makes them.

    Parameters
    ----------
    x : (M, K) float16, bfloat16 or float32, any strides
    values : (8 * offsets[-1],), dtype of ``x``
        The stored entries of W, those of a tile of 16 x 128 side by side, each tile padded with zeros.
    masks : (tiles, 64) int32
        A bit for each weight of a tile.
    offsets : (tiles + 1,) int32
        Where a tile's values start, in units of 8.
    bias : (N,), dtype of ``x``, optional
    shape : (N, K)
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : dtype of ``x`` (the default), or float32
    check : bool
        Look at every offset and mask first (on a GPU this waits for the device). Pass False only for arrays checked
        before, or made by ``to_bitmap_tiles``: wrong offsets then read out of bounds.
    tier : str, optional
        "simt" or "sm80": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major; sums are held in float32, in the same order every run, and rounded once.

    Up to 64 rows of float16 or bfloat16 x meet the stored weights themselves, which are read once and unpacked in
    registers. For more rows, and float32, W is written out densely, into N * K elements of memory held for the call
    alone, and multiplied as :func:`qsparse.kernels.gemm` does. Cards before 8.0, and float32, have ``simt`` alone,
    which always writes W out.

    Unlike CSR and COO, where what is not stored contributes nothing, a weight that is not stored is multiplied as a
    zero: where a row of ``x`` holds NaN or Inf, none of its outputs is finite. Raises TypeError for a wrong dtype;
    ValueError for shapes that do not fit, and with ``check`` for offsets, masks and values that do not fit each other.

    Source: a bitmap in the order of the tensor cores' fragments, after R. Fan et al., "SpInfer: Leveraging Low-Level
    Sparsity for Efficient Large Language Model Inference on GPUs" (EuroSys 2025); sparse in memory and dense when
    multiplied, after H. Xia et al., "Flash-LLM" (VLDB 2023).
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, values, masks, offsets, bias, list(shape), relu, out_dtype or x.dtype, check)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    m, k = x.shape
    n = _spmm.check_shape(shape, k)
    tall, wide = _bitmap_tiles.grid((n, k))
    check_tensor("masks", masks, (torch.int32,), (tall * wide, WORDS))
    check_tensor("offsets", offsets, (torch.int32,), (tall * wide + 1,))
    check_tensor("values", values, (x.dtype,), (None,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, (x.dtype, torch.float32))
    check_same_device(x, values=values, masks=masks, offsets=offsets, bias=bias)
    if check:
        _bitmap_tiles.check(values, masks, offsets, (n, k))
    values, masks, offsets = rows(values), rows(masks), rows(offsets)
    if x.device.type == "cpu":
        pick_tier(tier, (), x.device)
        return gemm(x, _bitmap_tiles.unpack(values, masks, offsets, (n, k)), bias, relu=relu, out_dtype=out_dtype)

    sm80 = x.dtype in _spmm_bitmap_sm80.DTYPES and spmm_bitmap.tier(x.device) == "sm80"
    possible = ["sm80", "simt"] if sm80 else ["simt"]
    sm80 = pick_tier(tier, possible, x.device) == "sm80"
    bias = None if bias is None else rows(bias)
    values, masks = (a if a.data_ptr() % 16 == 0 else a.clone() for a in (values, masks))
    if sm80 and _spmm_bitmap_sm80.takes_few(x, n):
        y = torch.empty((m, n), dtype=out_dtype, device=x.device)
        _spmm_bitmap_sm80.launch_few(matrix(x, k_major=True)[0], values, masks, offsets, bias, y, relu=relu)
        return y
    w = _dense(values, masks, offsets, (n, k), sm80)
    hopper = sm80 and torch.cuda.get_device_capability(x.device) == (9, 0)
    if hopper and out_dtype == x.dtype and _spmm_product_sm90.takes(x, n):
        return _spmm_product_sm90.product(x, w, None, None, None, bias, n, relu)
    return gemm(x, w, bias, relu=relu, out_dtype=out_dtype)


def _dense(values, masks, offsets, shape: tuple[int, int], sm80: bool) -> torch.Tensor:
    """``W (N, K)``, its rows on 16 bytes, of checked bitmap tiles on a GPU."""
    n, k = shape
    tiles, ld = offsets.numel() - 1, -(-k // CHUNK) * CHUNK
    out = torch.empty((n, ld), dtype=values.dtype, device=values.device)
    if sm80:
        _spmm_bitmap_sm80.launch_write(values, masks, offsets, out, k)
    else:
        launch(
            values.device,
            _DENSE,
            f"spmm_bitmap_dense<{C_FLOATS[values.dtype]}>",
            "PPPPqiii",
            (values.data_ptr(), masks.data_ptr(), offsets.data_ptr(), out.data_ptr(), ld, n, k, tiles),
            grid=-(-tiles * 32 // _BLOCK),
            block=_BLOCK,
        )
    return out[:, :k]


@torch.library.custom_op("qsparse::spmm_bitmap", mutates_args=())
def _operator(
    x: torch.Tensor,
    values: torch.Tensor,
    masks: torch.Tensor,
    offsets: torch.Tensor,
    bias: torch.Tensor | None,
    shape: list[int],
    relu: bool,
    out_dtype: torch.dtype,
    check: bool,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    options = {"shape": shape, "relu": relu, "out_dtype": out_dtype, "check": check}
    return spmm_bitmap(x, values, masks, offsets, bias, **options)


@_operator.register_fake
def _(x, values, masks, offsets, bias, shape, relu, out_dtype, check):
    return x.new_empty((x.shape[0], shape[0]), dtype=out_dtype)
