"""Dense matrix product with a fused bias and ReLU."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_simt, _gemm_single_sm90, _gemm_sm80, _gemm_sm90, _relu_mask
from qsparse.kernels._face import (
    C_FLOATS,
    check_choice,
    check_dtype,
    check_number,
    check_same_device,
    check_tensor,
    face,
    matrix,
    new_matrix,
    pick_tier,
    rows,
)

SOURCES = {
    _gemm_simt.SOURCE: _gemm_simt.INSTANCES,
    _gemm_sm80.SOURCE: _gemm_sm80.INSTANCES,
    _gemm_sm90.SOURCE: _gemm_sm90.INSTANCES,
    _gemm_single_sm90.SOURCE: _gemm_single_sm90.INSTANCES,
    _gemm_sm90.SPLIT_SOURCE: _gemm_sm90.SPLIT_INSTANCES,
}
_PRECISIONS = ("ieee", "highest", "high")
# K, or else multiply-adds, from which rows off 16-byte boundaries are copied, so that tensor cores read them (an H200).
_COPY_K, _COPY_WORK = 128, 2**26


# What the checks decide depends only on what `_key` holds of the arrays: a call like an earlier one skips them, which
# a small product on the GPU needs if the host is not to be the slower part. See `_repeat`.
_routes: dict[tuple, tuple] = {}


@face(SOURCES, in_place=("out",))
def gemm(
    x,
    w,
    bias=None,
    *,
    relu: bool = False,
    alpha: float = 1.0,
    out=None,
    accumulate: bool = False,
    out_dtype=None,
    return_mask: bool = False,
    mask=None,
    precision: str = "ieee",
    tier: str | None = None,
):
    """``y = act(alpha * x @ w.T + bias)``.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16
        Activations.
    w : (N, K), dtype of ``x``
        Weights, one row an output.
    bias : (N,), dtype of ``x``, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    alpha : float
        Scales the product, before the bias.
    out : (M, N) ``out_dtype``, row-major, optional
        Where to write; left out, a new array.
    accumulate : bool
        Add to what is in ``out`` (each output is rounded to ``out_dtype`` first, then added).
    out_dtype : dtype of ``x`` (the default), or float32
        Tensor cores cut their sums off where float32 arithmetic rounds, so on Hopper float32 outputs of halves are off
        by up to 2e-9 of their norm for each of K.
    return_mask : bool
        Return ``(y, mask)``: ``mask`` (M, ceil(N / 64)) int64 has bit ``n % 64`` of word ``n // 64`` set where
        ``y[m, n] > 0``: all that the backward of a ReLU needs to know, in one bit an output.
    mask : (M, ceil(N / 64)) int64, optional
        Outputs whose bit is not set become zero (before they are accumulated). So with ``y1, mask = gemm(x, w1, b1,
        relu=True, return_mask=True)`` and the gradient ``dz2`` behind the next layer, ``gemm(dz2, w2.T, mask=mask)``
        is the gradient before the first layer's ReLU.
    precision : str
        How float32 is multiplied. "ieee": by float32 multiply-adds (``simt``). "highest": on the tensor cores of a
        Hopper card, each operand split into two halves of 11 bits and three products summed; no less accurate than
        cuBLAS's SGEMM on normal data, and faster. Its limits: Inf in an operand gives NaN, and elements 2^17
        times smaller than the largest of their row lose bits. "high": plain tf32 there, 11 bits an operand. Other
        cards, CPUs, "highest" where the splitting would cost more than it gains (fewer than 128 rows or outputs, small
        products), and "high" with rows off 16-byte boundaries compute "ieee".
    tier : str, optional
        "simt", "sm80" or "sm90": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major (with ``return_mask``, the pair); sums are held in float32 and rounded once.

    Any strides work: a transposed view (``w.T``) is read in place, other views are copied first. So the backward
    products of a linear layer are ``gemm(dy, w.T)`` and ``gemm(dy.T, x.T)``. Rows that do not start on 16 bytes take
    the ``simt`` tier; in all but small products of halves on a Hopper card they are copied first, in each call, into
    memory held for it: a W whose K is a multiple of 8 saves that.

    Raises TypeError for another dtype; ValueError for shapes that do not fit, arrays on two devices, or a ``tier``
    that this GPU or these arrays cannot have.

    Sources: ``simt`` is register-tiled as in V. Volkov, J. Demmel, "Benchmarking GPUs to tune dense linear algebra"
    (SC 2008); ``sm80`` is built on PTX ``mma.sync``, ``ldmatrix`` and ``cp.async``; ``sm90`` on PTX ``wgmma`` and
    ``cp.async.bulk.tensor``, sections "Asynchronous Warpgroup Level Matrix Instructions" and "Tensors".
    """
    if torch.compiler.is_compiling() and (out, mask, tier) == (None, None, None) and not return_mask:
        return _operator(x, w, bias, relu, alpha, precision, out_dtype or x.dtype)
    if type(alpha) is not float:
        alpha = check_number("alpha", alpha)
    options = (out, accumulate, out_dtype, return_mask, mask, tier, precision)
    plain = options == (None, False, None, False, None, None, "ieee")
    if plain and (y := _repeat(x, w, bias, relu, alpha)) is not None:
        return y
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    m, k = x.shape
    check_tensor("w", w, (x.dtype,), (None, k))
    n = w.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_choice("precision", precision, _PRECISIONS)
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, (x.dtype, torch.float32))
    if out is not None:
        check_tensor("out", out, (out_dtype,), (m, n))
        if not out.is_contiguous():
            raise ValueError("out is written in place and must be row-major")
    elif accumulate:
        raise ValueError("accumulate adds to out, which was not given")
    if mask is not None and return_mask:
        raise ValueError("either apply a mask or return one: mask and return_mask exclude each other")
    if mask is not None:
        check_tensor("mask", mask, (torch.int64,), (m, _relu_mask.words(n)))
    check_same_device(x, w=w, bias=bias, out=out, mask=mask)
    if x.device.type == "cpu":
        pick_tier(tier, (), x.device)
        y = _cpu(x, w, bias, relu, alpha, out_dtype)
        return _finish(y, out, accumulate, mask, return_mask)

    given = x, w, bias
    tensor_cores = x.dtype != torch.float32 or precision != "ieee"
    best = gemm.tier(x.device)
    (x, x_k, ldx), (w, w_k, ldw) = (matrix(a, k_major=x.dtype == torch.float32 and tensor_cores) for a in (x, w))
    if tier is None and best == "sm90" and x.dtype != torch.float32 and (k >= _COPY_K or m * n * k >= _COPY_WORK):
        (x, ldx), (w, ldw) = _gemm_sm90.on_boundaries(x, x_k, ldx), _gemm_sm90.on_boundaries(w, w_k, ldw)
    bias, mask = (None if a is None else rows(a) for a in (bias, mask))
    operands = (x, x_k, ldx, w, w_k, ldw, bias)
    tier = pick_tier(tier, _possible(best, operands, precision), x.device)
    mode = _gemm_sm90.WRITE_MASK if return_mask else _gemm_sm90.NO_MASK if mask is None else _gemm_sm90.APPLY_MASK
    y = out if out is not None else torch.empty((m, n), dtype=out_dtype, device=x.device)
    if tier == "sm90" and _gemm_sm90.has_epilogue(x, x_k, w_k, out_dtype, mode) and precision != "highest":
        if return_mask:
            mask = torch.empty((m, _relu_mask.words(n)), dtype=torch.int64, device=x.device)
        if plain and x.dtype != torch.float32 and all(a is b for a, b in zip(given, (x, w, bias), strict=True)):
            _remember(x, w, bias, relu, _gemm_sm90.plan(*operands[:6], y, relu=relu))
        epilogue = {"alpha": alpha, "accumulate": accumulate, "mask": mask, "mask_mode": mode}
        _gemm_sm90.launch_gemm(*operands, y, relu=relu, **epilogue)
        return (y, mask) if return_mask else y
    result = torch.empty_like(y) if accumulate else y
    if tier == "sm90" and precision == "highest":
        _gemm_sm90.launch_split(x, ldx, w, ldw, bias, result, relu=relu, alpha=alpha)
    else:
        module = _gemm_sm90 if tier == "sm90" else _gemm_sm80 if tier == "sm80" and out_dtype == x.dtype else _gemm_simt
        module.launch_gemm(*operands, result, relu=relu, alpha=alpha)
    return _finish(result, out, accumulate, mask, return_mask)


@torch.library.custom_op("qsparse::gemm", mutates_args=())
def _operator(
    x: torch.Tensor,
    w: torch.Tensor,
    bias: torch.Tensor | None,
    relu: bool,
    alpha: float,
    precision: str,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return gemm(x, w, bias, relu=relu, alpha=alpha, precision=precision, out_dtype=out_dtype)


@_operator.register_fake
def _(x, w, bias, relu, alpha, precision, out_dtype):
    return x.new_empty((x.shape[0], w.shape[0]), dtype=out_dtype)


def _key(x, w, bias, relu: bool) -> tuple:
    # Types and signs too: the memory of a subclass, or of a negative view, need not hold its values.
    # Flat and at once, which is the quickest.
    # fmt: off
    if bias is None:
        return (
            relu, type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(),
            type(w), w.shape, w.stride(), w.dtype, w.device, w.is_neg(),
        )
    return (
        relu, type(x), x.shape, x.stride(), x.dtype, x.device, x.is_neg(),
        type(w), w.shape, w.stride(), w.dtype, w.device, w.is_neg(),
        type(bias), bias.shape, bias.stride(), bias.dtype, bias.device, bias.is_neg(),
    )
    # fmt: on


def _remember(x, w, bias, relu: bool, plan) -> None:
    if len(_routes) >= 4096:
        _routes.clear()
    _routes[_key(x, w, bias, relu)] = plan


def _repeat(x, w, bias, relu: bool, alpha: float):
    """The product, if an earlier call of the same kind went straight to ``sm90``; else None."""
    try:
        plan = _routes.get(_key(x, w, bias, relu))
    except (AttributeError, TypeError, RuntimeError):  # no dense tensors: the checks will say so
        return None
    if plan is None or (x.data_ptr() | w.data_ptr()) % 16:
        return None
    y = new_matrix(x, x.shape[0], w.shape[0])
    return _gemm_sm90.launch_plan(plan, x, w, bias, y, alpha)


def _possible(best: str, operands: tuple, precision: str) -> list[str]:
    """The tiers that a GPU whose best is ``best`` has and these arrays allow, best first."""
    x, x_k, ldx, w, w_k, ldw, _ = operands
    possible = ["simt"]
    if best != "simt" and _gemm_sm80.supports(x, x_k, ldx, w, w_k, ldw):
        possible.insert(0, "sm80")
    if best == "sm90" and _gemm_sm90.supports(x, ldx, w, ldw, precision):
        possible.insert(0, "sm90")
    return possible


def _finish(y, out, accumulate, mask, return_mask):
    """What the sm90 kernel does in its epilogue, after any other."""
    if mask is not None:
        y.masked_fill_(~_relu_mask.unpack(mask, y.shape[1]), 0)
    bits = _relu_mask.pack(y) if return_mask else None
    if out is not None and out is not y:
        y = out.add_(y) if accumulate else out.copy_(y)
    return (y, bits) if return_mask else y


@torch.no_grad()
def _cpu(x, w, bias, relu, alpha, out_dtype):
    if out_dtype != x.dtype:
        x, w, bias = x.float(), w.float(), None if bias is None else bias.float()
    if alpha == 1:
        y = torch.nn.functional.linear(x, w, bias)
    else:
        y = (x.float() @ w.float().t()).mul_(alpha)
        y = (y if bias is None else y.add_(bias.float())).to(out_dtype)
    return y.relu_() if relu else y
