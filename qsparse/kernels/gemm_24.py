"""Matrix product with 2:4 sparse weights, with a fused bias and ReLU."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_24_sm80, _gemm_24_sm90, _gemm_24_tiers, _two_four
from qsparse.kernels._face import C_FLOATS, check_dtype, check_same_device, check_tensor, face, rows
from qsparse.kernels.gemm import gemm

SOURCES = {
    _two_four.SOURCE: _two_four.INSTANCES,
    _gemm_24_sm80.SOURCE: _gemm_24_sm80.INSTANCES,
    _gemm_24_sm90.SOURCE: _gemm_24_sm90.INSTANCES,
}


@face(SOURCES)
def gemm_24(x, values, metadata, bias=None, *, relu: bool = False, out_dtype=None, tier: str | None = None):
    """``y = act(x @ w.T + bias)`` where every four neighbouring columns of ``w`` (N, K) keep two at most.

    Parameters
    ----------
    x : (M, K) float16, bfloat16 or float32
        Activations, any strides.
    values : (N, Kp / 2), dtype of ``x``
        The two kept weights of each group of four columns, row by row; Kp is K rounded up to a multiple of 8.
    metadata : (N, Kp / 8) uint8
        Four bits a group: the first kept column (0 to 3) | the second << 2, the columns ascending; the group of the
        lower columns has the lower bits of its byte. ``qsparse.sparse.compress_24`` makes both.
    bias : (N,), dtype of ``x``, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    out_dtype : dtype of ``x`` (the default), or float32
    tier : str, optional
        "simt", "sm80" or "sm90": take no other, for tests and measurements.

    Returns
    -------
    (M, N) ``out_dtype``, row-major; sums are held in float32 and rounded once.

    A Hopper card multiplies by ``wgmma.sp`` (``sm90``) unless an array is empty, cards of 8.0 and newer by ``mma.sp``
    (``sm80``) where K is a multiple of 32. The tier "simt", which takes everything, expands the weights and calls
    :func:`gemm`, as a CPU and float32 do: there the zeros between are multiplied too, by a NaN or an infinity of ``x``,
    say. What a tier wants of the weights in another layout is made at their first use and kept beside them: as many
    bytes again as the metadata have, and the values' where their rows do not begin on 16 bytes.

    Columns that do not ascend are not looked for and give wrong numbers (``qsparse.sparse.expand_24`` refuses them).

    Raises TypeError for another dtype; ValueError for shapes that do not fit, arrays on two devices, or a ``tier``
    that this GPU or these arrays cannot have.

    Sources: A. Mishra et al., "Accelerating sparse deep neural networks" (2021); PTX ISA, sections on sparse ``mma``
    and ``wgmma``.
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, values, metadata, bias, relu, out_dtype or x.dtype)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    n = _two_four.check(x, values, metadata, (x.dtype,))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    out_dtype = x.dtype if out_dtype is None else out_dtype
    check_dtype("out_dtype", out_dtype, (x.dtype, torch.float32))
    check_same_device(x, values=values, metadata=metadata, bias=bias)
    chosen = _gemm_24_tiers.pick(tier, gemm_24.tier(x.device), x, n, out_dtype)
    if chosen is not None:
        y = torch.empty((len(x), n), dtype=out_dtype, device=x.device)
        chosen.launch_gemm(x, values, metadata, y, (None if bias is None else rows(bias), relu))
        return y
    return gemm(x, _two_four.expand(values, metadata, x.shape[1]), bias, relu=relu, out_dtype=out_dtype)


@torch.library.custom_op("qsparse::gemm_24", mutates_args=())
def _operator(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    bias: torch.Tensor | None,
    relu: bool,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return gemm_24(x, values, metadata, bias, relu=relu, out_dtype=out_dtype)


@_operator.register_fake
def _(x, values, metadata, bias, relu, out_dtype):
    return x.new_empty((x.shape[0], values.shape[0]), dtype=out_dtype)
