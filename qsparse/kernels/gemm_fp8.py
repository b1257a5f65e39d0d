"""Matrix product of 8-bit floats (e4m3), with range-based scaling in the epilogue."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_int8_sm90 as sm90
from qsparse.kernels._face import C_FLOATS, check_dtype, check_same_device, check_tensor, cpu_slices, face, matrix, rows
from qsparse.kernels._gemm_int8_epilogue import Epilogue
from qsparse.kernels._gemm_sm90 import on_boundaries
from qsparse.kernels.gemm import gemm

SOURCES = {sm90.FP8_SOURCE: sm90.FP8_INSTANCES}


@face(SOURCES)
def gemm_fp8(x, w, scale_x=None, scale_w=None, bias=None, *, relu: bool = False, out_dtype=torch.float16):
    """``y = act(((x @ w.T) * scale_x) * scale_w + bias)`` of 8-bit floats.

    Parameters
    ----------
    x : (M, K) float8_e4m3fn, or its bits as uint8 (for NumPy and CuPy, which have no such type)
        Quantized activations, any strides (a view whose rows are not contiguous is copied).
    w : (N, K) float8_e4m3fn, or its bits as uint8
        Quantized weights, one row an output channel.
    scale_x : (M,) or (1,) float32, optional
        One scale a row or one for all; left out, 1.
    scale_w : (N,) or (1,) float32, optional
        One scale an output channel or one for all; left out, 1.
    bias : (N,) float32, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : torch.float16, bfloat16 or float32

    Returns
    -------
    (M, N) ``out_dtype``, row-major.

    On a Hopper card (``sm90``) the tensor cores multiply e4m3 and add with fewer bits than float32 has, as every fp8
    product there that does not stop to add in registers; ``qsparse bench int8`` prints the error. Rows off 16-byte
    boundaries are copied first, in each call. Elsewhere the operands become float16, which holds every e4m3 value, and
    :func:`gemm` multiplies them with float32 sums; on a CPU, float32.

    Raises TypeError for other dtypes, ValueError for shapes that do not fit.

    Sources: P. Micikevicius et al., "FP8 formats for deep learning" (2022); PTX ISA, ``wgmma``, type ``.e4m3``.
    """
    if torch.compiler.is_compiling():
        return _operator(x, w, scale_x, scale_w, bias, relu, out_dtype)
    check_tensor("x", x, (sm90.FP8, torch.uint8), (None, None))
    m, k = x.shape
    check_tensor("w", w, (sm90.FP8, torch.uint8), (None, k))
    n = w.shape[0]
    check_dtype("out_dtype", out_dtype, C_FLOATS)
    for name, value, size in (("scale_x", scale_x, m), ("scale_w", scale_w, n), ("bias", bias, n)):
        if value is not None:
            one = name != "bias" and isinstance(value, torch.Tensor) and value.numel() == 1
            check_tensor(name, value, (torch.float32,), (1 if one else size,))
    check_same_device(x, w=w, scale_x=scale_x, scale_w=scale_w, bias=bias)
    scale_x, scale_w, bias = (None if a is None else rows(a) for a in (scale_x, scale_w, bias))
    (x, _, ldx), (w, _, ldw) = (matrix(a.view(sm90.FP8), k_major=True) for a in (x, w))
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    hopper = gemm_fp8.tier(x.device) == "sm90"
    if hopper and m and n and k:
        (x, ldx), (w, ldw) = on_boundaries(x, True, ldx), on_boundaries(w, True, ldw)
    if hopper and sm90.supports(x, ldx, w, ldw, y):
        sm90.launch_gemm(x, ldx, w, ldw, y, Epilogue(scale_x, scale_w, bias, relu=relu))
        return y
    multiply = _float32 if x.device.type == "cpu" else _float16
    for part in cpu_slices(m) if x.device.type == "cpu" else (slice(m),):
        sums = multiply(x[part], w)
        if scale_x is not None:
            sums *= scale_x[part, None] if scale_x.numel() > 1 else scale_x
        if scale_w is not None:
            sums *= scale_w
        if bias is not None:
            sums += bias
        y[part] = sums.relu_() if relu else sums
    return y


@torch.no_grad()
def _float32(x, w):
    return x.float() @ w.float().t()


@torch.no_grad()
def _float16(x, w):
    return gemm(x.half(), w.half(), out_dtype=torch.float32)


@torch.library.custom_op("qsparse::gemm_fp8", mutates_args=())
def _operator(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_x: torch.Tensor | None,
    scale_w: torch.Tensor | None,
    bias: torch.Tensor | None,
    relu: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return gemm_fp8(x, w, scale_x, scale_w, bias, relu=relu, out_dtype=out_dtype)


@_operator.register_fake
def _(x, w, scale_x, scale_w, bias, relu, out_dtype):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
