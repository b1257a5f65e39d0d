"""Symmetric int8 quantization of each row of a matrix."""

from __future__ import annotations

import torch

from qsparse.kernels._face import C_FLOATS, check_tensor, cpu_slices, face, rows
from qsparse.kernels._load import launch

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
BLOCK = 256


def _instance(dtype: torch.dtype) -> str:
    return f"quantize_rows<{C_FLOATS[dtype]}>"


SOURCES = {"quantize_rows.cu": tuple(map(_instance, C_FLOATS))}


@face(SOURCES)
def quantize_rows(x):
    """``q = rint(x / scale)`` with one ``scale = absmax / 127`` a row, so that ``x ~ scale[:, None] * q``.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides

    Returns
    -------
    q : (M, K) int8 in [-127, 127], row-major; ties round to even
    scale : (M,) float32

    The division is a true one in float32, and CPU and GPU give the same bits. Where the scale would be below the
    smallest normal float32 it is 1 (a row of zeros). A row that holds NaN or Inf gets a NaN scale and zeros, so that
    its outputs are NaN and no other row's. Raises TypeError for another dtype, ValueError unless ``x`` is 2-D.

    Applied to weights ``(N, K)`` this is per-output-channel quantization.

    Source: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference" (CVPR 2018), with a zero point of 0.
    """
    if torch.compiler.is_compiling():
        return _operator(x)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    m, k = x.shape
    x = rows(x)
    if x.device.type == "cpu":
        return _cpu(x)
    q = torch.empty((m, k), dtype=torch.int8, device=x.device)
    scale = torch.empty(m, dtype=torch.float32, device=x.device)
    launch(
        x.device,
        "quantize_rows.cu",
        _instance(x.dtype),
        "PPPq",
        (x.data_ptr(), q.data_ptr(), scale.data_ptr(), k),
        grid=m,
        block=BLOCK,
    )
    return q, scale


@torch.library.custom_op("qsparse::quantize_rows", mutates_args=())
def _operator(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return quantize_rows(x)


@_operator.register_fake
def _(x):
    return x.new_empty(x.shape, dtype=torch.int8), x.new_empty(x.shape[0], dtype=torch.float32)


@torch.no_grad()
def _cpu(x):
    q = torch.empty(x.shape, dtype=torch.int8)
    scale = torch.empty(x.shape[0], dtype=torch.float32)
    for part in cpu_slices(x.shape[0]):
        _cpu_slice(x[part].float(), q[part], scale[part])
    return q, scale


def _cpu_slice(x, q, scale):
    absmax = x.abs().amax(1) if x.shape[1] else x.new_zeros(x.shape[0])
    torch.div(absmax, 127, out=scale)
    scale[scale < _SMALLEST_NORMAL] = 1
    finite = absmax.isfinite()
    scale[~finite] = torch.nan
    q.copy_((x / scale[:, None]).round_().clamp_(-127, 127))  # torch.round breaks ties to even
    if not finite.all():
        q[~finite] = 0
