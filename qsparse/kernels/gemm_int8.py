"""int8 matrix product in exact integers, with range-based scaling in the epilogue."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_int8_cpu, _gemm_int8_simt, _gemm_int8_sm80, _gemm_int8_sm90
from qsparse.kernels._face import check_same_device, check_tensor, face, matrix, pick_tier, rows
from qsparse.kernels._gemm_int8_cpu import cpu_method
from qsparse.kernels._gemm_int8_epilogue import Epilogue

__all__ = ["cpu_method", "gemm_int8"]

_TIERS = {"simt": _gemm_int8_simt, "sm80": _gemm_int8_sm80, "sm90": _gemm_int8_sm90}  # worst first
SOURCES = {tier.SOURCE: tier.INSTANCES for tier in _TIERS.values()}
_SUMS_K = 2**24  # the longest row of weights whose sum cannot leave int32
# K, or else multiply-adds, from which rows off 16-byte boundaries are copied, so that tensor cores read them (an H200).
_COPY_K, _COPY_WORK = 256, 2**26


def longest_int32(dtype: torch.dtype, corrected: bool = False) -> int:
    """The longest K whose sums cannot leave int32: of -128..127 by -128..127, or of differences up to 255."""
    return (2**31 - 1) // ((255 if corrected or dtype == torch.uint8 else 128) * 128)


# What the checks decide depends only on what `_key` holds of the arrays: a call like an earlier one skips them, which
# a small product on the GPU needs if the host is not to be the slower part.
_routes: dict[tuple, tuple] = {}


@face(SOURCES)
def gemm_int8(
    x,
    w,
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
    """``y = act(((float32) acc * scale_x) * scale_w + bias)`` with exact integers ``acc = (x - zero_x) @ w.T``.

    Parameters
    ----------
    x : (M, K) int8 or uint8
        Quantized activations, any strides (a view whose rows are not contiguous is copied; in large products one off
        16-byte boundaries too, for the tensor cores).
    w : (N, K) int8
        Quantized weights, one row an output channel.
    scale_x : (M,) or (1,) float32, optional
        One scale a row or one for all; left out, 1.
    scale_w : (N,) or (1,) float32, optional
        One scale an output channel or one for all; left out, 1.
    bias : (N,) float32, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : torch.dtype
        float32, float16 or bfloat16; int32 or int64 for the bare ``acc`` (``scale_x``, ``scale_w`` and ``bias`` must
        then be left out); int8 or uint8 for ``y`` quantized again, the next layer's input.
    zero_x : (M,) or (1,) int32, optional
        Zero points of the activations, within the range of the dtype of ``x``.
    sums_w : (N,) int32, optional
        ``w.sum(1)``, which ``zero_x`` needs: computed on each call where it is left out, so keep it with the weights.
    scale_y : (1,) float32
        For an 8-bit ``out_dtype`` alone: the output is ``rint(y / scale_y)``, by a true division with ties to even,
        clipped to [-127, 127] for int8 and to [0, 255] for uint8, which after a ReLU is one bit more. Integers hold
        no NaN: it becomes 0; what is infinite is clipped. So a ``scale_y`` that is no step, 0, NaN or Inf, gives
        numbers, the same on every device; it is not refused, since on a GPU to look at it would wait.
    tier : str, optional
        "simt", "sm80" or "sm90": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major.

    Sums are int32 up to K = 131,071, where no int8 input can overflow it (65,793 for uint8 or with ``zero_x``), and
    int64 beyond; ``out_dtype`` int32 is refused there. Every step of the epilogue is rounded to float32, so the CPU
    and the GPU give the same bits, and all tiers do.

    Raises TypeError and ValueError naming the argument.

    On a CPU the product is ``torch._int_mm``; a CPU without VNNI instructions multiplies in float32 by slices short
    enough to be exact, which is faster there.

    Sources: zero points are taken out of the product by sums, as in B. Jacob et al., "Quantization and Training of
    Neural Networks for Efficient Integer-Arithmetic-Only Inference" (CVPR 2018), section 2.3; PTX ISA, ``wgmma`` and
    ``mma.sync`` of ``.s8`` and ``.u8``, ``dp4a``.
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, w, scale_x, scale_w, bias, relu, out_dtype, zero_x, sums_w, scale_y)
    given = (x, w, scale_x, scale_w, bias, zero_x, sums_w, scale_y)
    if tier is None and (y := _repeat(given, relu, out_dtype)) is not None:
        return y
    check_tensor("x", x, (torch.int8, torch.uint8), (None, None))
    m, k = x.shape
    check_tensor("w", w, (torch.int8,), (None, k))
    n = w.shape[0]
    check_same_device(x, w=w)
    epilogue = Epilogue(*given[2:], relu)
    epilogue.check(x, n, out_dtype)
    if zero_x is not None and k > _SUMS_K:
        raise ValueError(f"zero_x is possible up to K = {_SUMS_K} (K is {k}): sums of weights must fit int32")
    longest = longest_int32(x.dtype, zero_x is not None)
    if k > longest and out_dtype == torch.int32:
        raise ValueError(f"out_dtype int32 can overflow beyond K = {longest} (K is {k}); ask for int64")
    epilogue = epilogue.prepared(w)
    if x.device.type == "cpu":
        pick_tier(tier, (), x.device)
        return _gemm_int8_cpu.compute(rows(x), rows(w), epilogue, out_dtype, k > longest)

    best = gemm_int8.tier(x.device) if k <= longest else "simt"
    worth_copying = k >= _COPY_K or m * n * k >= _COPY_WORK
    (x, ldx), (w, ldw) = _operands(x, w, align=tier is None and best != "simt" and worth_copying)
    y = torch.empty((m, n), dtype=out_dtype, device=x.device)
    chosen = pick_tier(tier, _possible(best, x, ldx, w, ldw, y), x.device)
    if chosen == "simt":
        _gemm_int8_simt.launch_gemm(x, ldx, w, ldw, y, epilogue, wide=k > longest)
    else:
        _TIERS[chosen].launch_gemm(x, ldx, w, ldw, y, epilogue)
        if tier is None and all(a is b for a, b in zip(given, (x, w, *epilogue[:-1]), strict=True)):
            if len(_routes) >= 4096:
                _routes.clear()
            _routes[_key(given, out_dtype)] = _TIERS[chosen], ldx, ldw
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
    zero_x: torch.Tensor | None,
    sums_w: torch.Tensor | None,
    scale_y: torch.Tensor | None,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    more = {"out_dtype": out_dtype, "zero_x": zero_x, "sums_w": sums_w, "scale_y": scale_y}
    return gemm_int8(x, w, scale_x, scale_w, bias, relu=relu, **more)


@_operator.register_fake
def _(x, w, scale_x, scale_w, bias, relu, out_dtype, zero_x, sums_w, scale_y):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


def _key(arrays: tuple, out_dtype: torch.dtype) -> tuple:
    # Types and signs too: the memory of a subclass, or of a negative view, need not hold its values.
    # A list is built quicker than a generator runs.
    return out_dtype, *[
        None if a is None else (type(a), a.shape, a.stride(), a.dtype, a.device, a.is_neg()) for a in arrays
    ]


def _repeat(arrays: tuple, relu: bool, out_dtype: torch.dtype) -> torch.Tensor | None:
    """The product, if an earlier call of the same kind needed no copies and no ``simt``; else None."""
    try:
        route = _routes.get(_key(arrays, out_dtype))
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors: the checks will say so
        return None
    x, w, *values = arrays
    if route is None or (x.data_ptr() | w.data_ptr()) % 16:
        return None
    module, ldx, ldw = route
    y = torch.empty((x.shape[0], w.shape[0]), dtype=out_dtype, device=x.device)  # PyTorch aligns it by 512 bytes
    module.launch_gemm(x, ldx, w, ldw, y, Epilogue(*values, relu))
    return y


def _operands(*operands: torch.Tensor, align: bool) -> list[tuple[torch.Tensor, int]]:
    """Matrices whose rows are contiguous, with the stride of rows; ``align``: rows on 16-byte boundaries, K padded."""
    found = []
    for a in operands:
        a, _, ld = matrix(a, k_major=True)
        if align and (a.data_ptr() | ld) % 16:
            padded = torch.zeros((len(a), -(-a.shape[1] // 16) * 16), dtype=a.dtype, device=a.device)
            padded[:, : a.shape[1]] = a
            a, ld = padded, padded.shape[1]
        found.append((a, ld))
    return found


def _possible(best: str, x, ldx: int, w, ldw: int, y) -> list[str]:
    """The tiers that a GPU whose best is ``best`` has and these arrays allow, best first."""
    order = list(_TIERS)
    served = reversed(order[: order.index(best) + 1])
    return [name for name in served if name == "simt" or _TIERS[name].supports(x, ldx, w, ldw, y)]
