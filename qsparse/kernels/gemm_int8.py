"""int8 matrix product in exact integers, with range-based scaling in the epilogue."""

from __future__ import annotations

import torch

from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, cpu_slices, face, rows
from qsparse.kernels._load import launch

_C = {**C_FLOATS, torch.int32: "int", torch.int64: "long long"}
BM = BN = 64  # the tile of gemm_int8_simt.cu
BLOCK = 256
INT32_K = (2**31 - 1) // (128 * 128)  # the longest sum of int8 products that cannot leave int32, -128 included


def _instance(out_dtype: torch.dtype, wide: bool, words: bool) -> str:
    return f"gemm_int8_simt<{_C[out_dtype]}, {'long long' if wide else 'int'}, {str(words).lower()}>"


SOURCES = {
    "gemm_int8_simt.cu": tuple(
        _instance(dtype, wide, words)
        for dtype in _C
        for wide in (False, True)
        for words in (False, True)
        if not (wide and dtype == torch.int32)
    ),
}


@face(SOURCES)
def gemm_int8(x, w, scale_x=None, scale_w=None, bias=None, *, relu: bool = False, out_dtype=torch.float32):
    """``y = act(((float32) (x @ w.T) * scale_x) * scale_w + bias)`` with an exact integer product.

    Parameters
    ----------
    x : (M, K) int8
        Quantized activations, any strides (a view that is not row-major is copied).
    w : (N, K) int8
        Quantized weights, one row an output channel.
    scale_x : (M,) or (1,) float32, optional
        One scale a row or one for all; left out, 1.
    scale_w : (N,) or (1,) float32, optional
        One scale an output channel or one for all; left out, 1.
    bias : (N,) float32, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : torch.float32, float16 or bfloat16; or torch.int32 or int64 for the bare accumulator
        (``scale_x``, ``scale_w`` and ``bias`` must then be left out).

    Returns
    -------
    (M, N) ``out_dtype``, row-major.

    The accumulator is int32 up to K = 131,071, where no int8 input can overflow it, and int64 beyond; ``out_dtype``
    int32 is refused there. Every step of the epilogue is rounded to float32, so the CPU and the GPU give the same
    bits. Raises TypeError and ValueError naming the argument.

    On a CPU the product is ``torch._int_mm``; a CPU without VNNI instructions multiplies in float32 by slices short
    enough to be exact, which is faster there.
    """
    if torch.compiler.is_compiling():
        return _operator(x, w, scale_x, scale_w, bias, relu, out_dtype)
    check_tensor("x", x, (torch.int8,), (None, None))
    m, k = x.shape
    check_tensor("w", w, (torch.int8,), (None, k))
    n = w.shape[0]
    if out_dtype not in _C:
        raise TypeError(f"out_dtype must be one of {', '.join(map(str, _C))}, got {out_dtype}")
    scaled = {"scale_x": (scale_x, m), "scale_w": (scale_w, n), "bias": (bias, n)}
    for name, (value, size) in scaled.items():
        if value is None:
            continue
        if not out_dtype.is_floating_point:
            raise ValueError(f"{name} has no meaning with out_dtype {out_dtype}, which is the bare accumulator")
        one = name != "bias" and isinstance(value, torch.Tensor) and value.numel() == 1
        check_tensor(name, value, (torch.float32,), (1 if one else size,))
    check_same_device(x, w=w, scale_x=scale_x, scale_w=scale_w, bias=bias)
    wide = k > INT32_K
    if wide and out_dtype == torch.int32:
        raise ValueError(f"out_dtype int32 can overflow beyond K = {INT32_K} (K is {k}); ask for int64")
    x, w = rows(x), rows(w)
    if x.device.type == "cpu":
        return _cpu(x, w, scale_x, scale_w, bias, relu, out_dtype)

    scale_x, scale_w, bias = (None if value is None else rows(value) for value in (scale_x, scale_w, bias))
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    words = k % 4 == 0 and x.data_ptr() % 4 == 0 and w.data_ptr() % 4 == 0
    launch(
        x.device,
        "gemm_int8_simt.cu",
        _instance(out_dtype, wide, words),
        "PPPiPiPPqqqi",
        (
            x.data_ptr(),
            w.data_ptr(),
            *_scale(scale_x),
            *_scale(scale_w),
            0 if bias is None else bias.data_ptr(),
            y.data_ptr(),
            m,
            n,
            k,
            relu,
        ),
        grid=-(-m // BM) * -(-n // BN),
        block=BLOCK,
    )
    return y


@torch.library.custom_op("qsparse::gemm_int8", mutates_args=())
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
    return gemm_int8(x, w, scale_x, scale_w, bias, relu=relu, out_dtype=out_dtype)


@_operator.register_fake
def _(x, w, scale_x, scale_w, bias, relu, out_dtype):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


def _scale(scale: torch.Tensor | None) -> tuple[int, int]:
    """Pointer and step (0 when one scale serves all) of a scale argument."""
    return (0, 0) if scale is None else (scale.data_ptr(), int(scale.numel() > 1))


# --- tier cpu -------------------------------------------------------------------------------------------------------


def cpu_method() -> str:
    """How this CPU multiplies int8: ``torch._int_mm`` with VNNI instructions, else float32 by exact slices."""
    return "torch._int_mm" if torch.cpu._is_vnni_supported() else "float32 slices"


@torch.no_grad()
def _cpu(x, w, scale_x, scale_w, bias, relu, out_dtype):
    m, n = x.shape[0], w.shape[0]
    accumulate = _int_mm if cpu_method() == "torch._int_mm" else _float_slices
    y = torch.empty((m, n), dtype=out_dtype)
    for part in cpu_slices(m):
        acc = accumulate(x[part], w)
        if not out_dtype.is_floating_point:
            y[part] = acc.clamp_(min=0) if relu else acc
            continue
        out = acc.to(torch.float32)
        if scale_x is not None:
            out *= scale_x[part, None] if scale_x.numel() > 1 else scale_x
        if scale_w is not None:
            out *= scale_w
        if bias is not None:
            out += bias
        y[part] = out.relu_() if relu else out
    return y


def _slices(k: int, step: int):
    return (slice(start, start + step) for start in range(0, k, step))


def _int_mm(x, w):
    """PyTorch's int8 product, with K = 1 padded (it returns wrong integers there) and long sums widened."""
    k = x.shape[1]
    if k == 0:
        return torch.zeros((x.shape[0], w.shape[0]), dtype=torch.int32)
    if k == 1:
        x, w = (torch.nn.functional.pad(a, (0, 1)) for a in (x, w))
    if k <= INT32_K:
        return torch._int_mm(x, w.t())
    return sum(torch._int_mm(rows(x[:, part]), rows(w[:, part]).t()).to(torch.int64) for part in _slices(k, 2**16))


def _float_slices(x, w):
    """Exact products in float32: 1,023 products of two int8 stay below 2^24, the last integer that float32 holds."""
    acc = torch.zeros((x.shape[0], w.shape[0]), dtype=torch.int64 if x.shape[1] > INT32_K else torch.int32)
    for part in _slices(x.shape[1], 1023):
        acc += (x[:, part].float() @ w[:, part].float().t()).to(torch.int32)
    return acc
