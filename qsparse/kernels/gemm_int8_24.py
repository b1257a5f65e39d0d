"""int8 matrix product with 2:4 sparse weights, with range-based scaling in the epilogue."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_24_sm80, _gemm_24_sm90, _gemm_24_tiers, _two_four
from qsparse.kernels._face import check_same_device, check_tensor, face
from qsparse.kernels._gemm_int8_epilogue import Epilogue
from qsparse.kernels.gemm_int8 import gemm_int8, longest_int32

SOURCES = {
    _two_four.INT8_SOURCE: _two_four.INT8_INSTANCES,
    _gemm_24_sm80.INT8_SOURCE: _gemm_24_sm80.INT8_INSTANCES,
    _gemm_24_sm90.INT8_SOURCE: _gemm_24_sm90.INT8_INSTANCES,
}


@face(SOURCES)
def gemm_int8_24(
    x,
    values,
    metadata,
    scale_x=None,
    scale_w=None,
    bias=None,
    *,
    relu: bool = False,
    out_dtype=torch.float32,
    zero_x=None,
    sums_w=None,
    scale_y=None,
    tier: str | None = None,
):
    """:func:`gemm_int8` where every four neighbouring columns of ``w`` (N, K) keep two at most: the same bits.

    Parameters
    ----------
    x : (M, K) int8 or uint8
        Quantized activations, any strides.
    values : (N, Kp / 2) int8
        The two kept weights of each group of four columns, row by row; Kp is K rounded up to a multiple of 8.
    metadata : (N, Kp / 8) uint8
        Which two, in four bits a group, as in :func:`gemm_24`; ``qsparse.sparse.compress_24`` makes both.
    scale_x : (M,) or (1,) float32, optional
        One scale a row or one for all; left out, 1.
    scale_w : (N,) or (1,) float32, optional
        One scale an output channel or one for all; left out, 1.
    bias : (N,) float32, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : torch.dtype
        As in :func:`gemm_int8`: a float, int32 or int64 for the bare sums, int8 or uint8 with ``scale_y``.
    zero_x : (M,) or (1,) int32, optional
        Zero points of the activations, within the range of the dtype of ``x``.
    sums_w : (N,) int32, optional
        ``values.sum(1)``, which ``zero_x`` needs: computed on each call where it is left out.
    scale_y : (1,) float32
        For an 8-bit ``out_dtype`` alone.
    tier : str, optional
        "simt", "sm80" or "sm90": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major.

    The tiers are those of :func:`gemm_24`, which also says what is kept beside the weights; "simt", which takes
    everything, expands the weights and calls :func:`gemm_int8`, as a CPU does, and for int64 sums every card. Integers
    and epilogue are the same in all of them, so the bits are.

    Raises TypeError and ValueError naming the argument.

    Sources: those of :func:`gemm_24` and of :func:`gemm_int8`.
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, values, metadata, scale_x, scale_w, bias, relu, out_dtype, zero_x, sums_w, scale_y)
    check_tensor("x", x, (torch.int8, torch.uint8), (None, None))
    n = _two_four.check(x, values, metadata, (torch.int8,))
    check_same_device(x, values=values, metadata=metadata)
    epilogue = Epilogue(scale_x, scale_w, bias, zero_x, sums_w, scale_y, relu)
    epilogue.check(x, n, out_dtype)
    m, k = x.shape
    best = gemm_int8_24.tier(x.device) if k <= longest_int32(x.dtype, zero_x is not None) else "simt"
    chosen = _gemm_24_tiers.pick(tier, best, x, n, out_dtype)
    if chosen is None:
        more = {"out_dtype": out_dtype, "zero_x": zero_x, "sums_w": sums_w, "scale_y": scale_y}
        return gemm_int8(x, _two_four.expand(values, metadata, k), scale_x, scale_w, bias, relu=relu, **more)
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    chosen.launch_gemm(x, values, metadata, y, epilogue.prepared(values))
    return y


@torch.library.custom_op("qsparse::gemm_int8_24", mutates_args=())
def _operator(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    relu: bool,
    out_dtype: torch.dtype,
    zero_x: torch.Tensor | None,
    sums_w: torch.Tensor | None,
    scale_y: torch.Tensor | None,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    more = {"out_dtype": out_dtype, "zero_x": zero_x, "sums_w": sums_w, "scale_y": scale_y}
    return gemm_int8_24(x, values, metadata, scale_x, scale_w, bias, relu=relu, **more)


@_operator.register_fake
def _(x, values, metadata, scale_x, scale_w, bias, relu, out_dtype, zero_x, sums_w, scale_y):
    return x.new_empty((x.shape[0], values.shape[0]), dtype=out_dtype)
