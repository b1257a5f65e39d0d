"""``gemm_int8`` on a CPU: exact products by PyTorch, and the epilogue step by step."""

from __future__ import annotations

import torch

from qsparse.kernels._face import cpu_slices, rows
from qsparse.kernels._gemm_int8_epilogue import Epilogue

_INT_MM_K = (2**31 - 1) // (128 * 128)  # the longest sum of products of two int8 that cannot leave int32


def cpu_method() -> str:
    """How this CPU multiplies int8: ``torch._int_mm`` with VNNI instructions, else float32 by exact slices."""
    return "torch._int_mm" if torch.cpu._is_vnni_supported() else "float32 slices"


@torch.no_grad()
def compute(x: torch.Tensor, w: torch.Tensor, epilogue: Epilogue, out_dtype: torch.dtype, wide: bool) -> torch.Tensor:
    """The product of contiguous ``x`` (M, K) int8 or uint8 and ``w`` (N, K) int8, as the face documents it."""
    m, n = x.shape[0], w.shape[0]
    multiply = _int_mm if cpu_method() == "torch._int_mm" else _float_slices
    offset, zero, sums = 0, epilogue.zero_x, epilogue.sums_w
    if x.dtype == torch.uint8:  # u = s + 128 with an int8 s: one more zero point
        x, offset = (x ^ 128).view(torch.int8), 128
        sums = w.sum(1, dtype=torch.int64 if wide else torch.int32) if sums is None else sums
    y = torch.empty((m, n), dtype=out_dtype)
    for part in cpu_slices(m):
        acc = multiply(x[part], w)
        if wide:
            acc = acc.to(torch.int64)
        if offset:
            acc += sums.to(acc.dtype) * offset
        if zero is not None:
            rows_zero = (zero[part] if zero.numel() > 1 else zero).to(acc.dtype)
            acc -= rows_zero[:, None] * sums.to(acc.dtype)
        y[part] = _finish(acc, _of_rows(epilogue.scale_x, part), epilogue, out_dtype)
    return y


def _of_rows(scale: torch.Tensor | None, part: slice) -> torch.Tensor | None:
    return scale[part, None] if scale is not None and scale.numel() > 1 else scale


def _finish(acc: torch.Tensor, scale_x: torch.Tensor | None, epilogue: Epilogue, out_dtype: torch.dtype):
    """What becomes of exact sums (rows, N): every step is one rounded float32 operation."""
    if out_dtype in (torch.int32, torch.int64):
        return acc.clamp_(min=0) if epilogue.relu else acc
    out = acc.to(torch.float32)
    if scale_x is not None:
        out *= scale_x
    if epilogue.scale_w is not None:
        out *= epilogue.scale_w
    if epilogue.bias is not None:
        out += epilogue.bias
    if epilogue.relu:
        out.relu_()
    if not out_dtype.is_floating_point:
        low, high = (-127, 127) if out_dtype == torch.int8 else (0, 255)
        out.div_(epilogue.scale_y).round_().nan_to_num_(0, high, low).clamp_(low, high)  # round: ties to even
    return out


def _slices(k: int, step: int):
    return (slice(start, start + step) for start in range(0, k, step))


def _int_mm(x, w):
    """PyTorch's int8 product, with K = 1 padded (it returns wrong integers there) and long sums widened."""
    k = x.shape[1]
    if k == 0:
        return torch.zeros((x.shape[0], w.shape[0]), dtype=torch.int32)
    if k == 1:
        x, w = (torch.nn.functional.pad(a, (0, 1)) for a in (x, w))
    if k <= _INT_MM_K:
        return torch._int_mm(x, w.t())
    return sum(torch._int_mm(rows(x[:, part]), rows(w[:, part]).t()).to(torch.int64) for part in _slices(k, 2**16))


def _float_slices(x, w):
    """Exact products in float32: 1,023 products of two int8 stay below 2^24, the last integer that float32 holds."""
    acc = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.int64 if x.shape[1] > _INT_MM_K else torch.int32)
    for part in _slices(x.shape[1], 1023):
        acc += (x[:, part].float() @ w[:, part].float().t()).to(torch.int32)
    return acc
