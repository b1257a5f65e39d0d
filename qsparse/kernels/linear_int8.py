"""An int8 layer (W8A8) of float activations, which are quantized on the way."""

from __future__ import annotations

import torch

from qsparse.kernels import _linear_int8_few_sm80
from qsparse.kernels._face import C_FLOATS, check_dtype, check_same_device, check_tensor, face, rows
from qsparse.kernels._load import following
from qsparse.kernels.gemm_int8 import gemm_int8
from qsparse.kernels.quantize_rows import quantize_rows

SOURCES = {_linear_int8_few_sm80.SOURCE: _linear_int8_few_sm80.INSTANCES}


@face(SOURCES)
def linear_int8(
    x,
    w,
    scale_w,
    bias=None,
    *,
    scale_x=None,
    relu: bool = False,
    out_dtype=torch.float32,
    one_launch: bool | None = None,
):
    """``y = act(x @ (scale_w[:, None] * w).T + bias)`` with each row of ``x`` quantized to int8.

    It computes ``gemm_int8(q, w, scale, scale_w, bias)`` of ``q, scale = quantize_rows(x, scale_x)``, and gives the
    bits of these two calls.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides
    w : (N, K) int8
    scale_w : (N,) or (1,) float32
    bias : (N,) float32, optional
    scale_x : (1,) float32, optional
        One scale for all rows, found before; what lies beyond 127 of these is clipped. Left out, each row has its own.
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : torch.dtype
        float32, float16 or bfloat16.
    one_launch : bool, optional
        On a GPU, True demands the kernel that does both at once, False the two calls; None takes it where it can.

    Returns
    -------
    (M, N) ``out_dtype``, row-major. A row of ``x`` that holds NaN or Inf gives NaN.

    From compute capability 8.0 on one launch serves up to 16 outputs, a network's head, of K that are multiples of 16
    up to 4,096: ``x`` is read once and its integers stay on the chip.
    Raises TypeError and ValueError naming the argument, ValueError too where ``one_launch`` is demanded and there is
    none.

    Sources: those of :func:`quantize_rows` and of :func:`gemm_int8`.
    """
    if torch.compiler.is_compiling():
        return _operator(x, w, scale_w, bias, scale_x, relu, out_dtype)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    _check_arrays(x, w, scale_w, bias, scale_x)
    check_dtype("out_dtype", out_dtype, C_FLOATS)
    if x.device.type == "cuda" and one_launch is not False:
        y = _launch(x, w, scale_w, bias, scale_x, relu, out_dtype)
        if y is not None:
            return y
    if one_launch:
        raise ValueError(
            f"one_launch is not possible for {len(x)} rows of {x.shape[1]} and {len(w)} outputs on {x.device}"
        )
    q, scale = quantize_rows(x, scale_x)
    with following():
        return gemm_int8(q, w, scale, scale_w, bias, relu=relu, out_dtype=out_dtype)


def _launch(x, w, scale_w, bias, scale_x, relu, out_dtype) -> torch.Tensor | None:
    """The layer by one kernel, or None where there is none."""
    if linear_int8.tier(x.device) == "simt" or w.shape[0] > _linear_int8_few_sm80.OUTPUTS:
        return None
    x, w = rows(x), rows(w)
    if not _linear_int8_few_sm80.supports(x, w):
        return None
    y = torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype, device=x.device)
    bias, scale_x = (None if a is None else rows(a) for a in (bias, scale_x))
    _linear_int8_few_sm80.launch_linear(x, w, rows(scale_w), bias, scale_x, y, relu)
    return y


def _check_arrays(x, w, scale_w, bias, scale_x) -> None:
    """Raise unless everything fits ``x``."""
    check_tensor("w", w, (torch.int8,), (None, x.shape[1]))
    n = w.shape[0]
    one = isinstance(scale_w, torch.Tensor) and scale_w.numel() == 1
    check_tensor("scale_w", scale_w, (torch.float32,), (1 if one else n,))
    if bias is not None:
        check_tensor("bias", bias, (torch.float32,), (n,))
    if scale_x is not None:
        check_tensor("scale_x", scale_x, (torch.float32,), (1,))
    check_same_device(x, w=w, scale_w=scale_w, bias=bias, scale_x=scale_x)


@torch.library.custom_op("qsparse::linear_int8", mutates_args=())
def _operator(
    x: torch.Tensor,
    w: torch.Tensor,
    scale_w: torch.Tensor,
    bias: torch.Tensor | None,
    scale_x: torch.Tensor | None,
    relu: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return linear_int8(x, w, scale_w, bias, scale_x=scale_x, relu=relu, out_dtype=out_dtype)


@_operator.register_fake
def _(x, w, scale_w, bias, scale_x, relu, out_dtype):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)
