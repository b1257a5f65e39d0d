"""Range -> scale and zero point -> few bits, and back: ``x ~ scale * (q - zero_point)``.

q is an integer of 2 to 8 bits, or a number of a small float: "e2m1" (a sign, 2 bits of exponent, 1 of mantissa; up to
6) or "e4m3" (up to 448, as ``torch.float8_e4m3fn``), whose steps widen with its size. Both are held in float32 here.

Sources: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"
(CVPR 2018), equation 1. Open Compute Project, "Microscaling Formats (MX) Specification" 1.0 (2023), section 5.3.
"""

from collections.abc import Callable

import torch
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_FLOATS = {"e2m1": (6.0, 1, 0), "e4m3": (448.0, 3, -6)}  # largest, bits of mantissa, least exponent of a normal number

Extremes = Callable[[Tensor], tuple[Tensor, Tensor]]
"""Rows (R, C) that share a scale each -> what each is quantized over, lo and hi (R,)."""


def minmax(rows: Tensor) -> tuple[Tensor, Tensor]:
    """The `Extremes` that cut nothing off."""
    return rows.amin(dim=1), rows.amax(dim=1)


def limits(bits: int | str, symmetric: bool = True) -> tuple[float, float]:
    """The smallest and the largest q: (-127, 127) of 8 bits, (0, 255) where not symmetric, (-6, 6) of "e2m1"."""
    if isinstance(bits, str):
        return -_FLOATS[bits][0], _FLOATS[bits][0]
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def scale_and_zero(lo: Tensor, hi: Tensor, bits: int | str, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Scale and zero point (integers in float32) of ranges ``lo <= hi``, float32 of any shape; 0 is always included.

    Symmetric: ``max(|lo|, |hi|)`` over the largest q, and 0. The largest of 8 bits is 127 (torchao divides by 127.5,
    and uses -128 too). Else ``(hi - lo) / (2^bits - 1)`` and the integer nearest to ``-lo / scale``, so that 0 is
    exact. Where the scale would be below the smallest normal float32 it is 1, and the zero point 0.
    """
    lo, hi = lo.float().clamp(max=0), hi.float().clamp(min=0)
    q_min, q_max = limits(bits, symmetric)
    scale = torch.maximum(-lo, hi) / q_max if symmetric else hi / q_max - lo / q_max  # hi - lo could overflow
    usable = scale >= _SMALLEST_NORMAL
    scale = torch.where(usable, scale, 1)
    zero = torch.zeros_like(scale) if symmetric else (-lo / scale).round().clamp(q_min, q_max)
    return scale, torch.where(usable, zero, 0)


def to_grid(x: Tensor, scale: Tensor, zero: Tensor, bits: int | str, symmetric: bool = True) -> Tensor:
    """q, in float32: ``clamp(rint(x / scale) + zero)``, or the float nearest to ``x / scale``, at most the largest.

    A true division; ties to even.
    """
    q = x / scale
    q = _round_float(q, bits) if isinstance(bits, str) else q.round() + zero
    return q.clamp(*limits(bits, symmetric))


def _round_float(x: Tensor, bits: str) -> Tensor:
    """The nearest of the floats of that many bits, had they no largest. Ties go to an even mantissa."""
    _, mantissa, least = _FLOATS[bits]
    exponent = torch.frexp(x).exponent - 1  # 2^exponent <= |x| < 2^(exponent + 1)
    step = torch.ldexp(torch.ones_like(x), exponent.clamp(min=least) - mantissa)
    return (x / step).round() * step


def to_reals(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``scale * (q - zero)``."""
    return scale * (q - zero)


def groups(k: int, granularity: str, group: int) -> int:
    """Columns of `k` that share a scale; the last group may be short."""
    return min(group, k) if granularity == "group" else k


def weight_grid(
    w: Tensor,
    bits: int | str,
    granularity: str,
    group: int,
    symmetric: bool = True,
    extremes: Extremes = minmax,
) -> tuple[Tensor, Tensor]:
    """Scales and zero points of w (N, K): (1, 1) of a tensor, (N, 1) of channels, (N, G) of groups."""
    size = groups(w.shape[1], granularity, group)
    if not w.numel():
        parts = [w.new_zeros(w.shape[0], 1)]
    elif granularity == "tensor":
        parts = [w.reshape(1, -1)]
    else:
        parts = w.split(size, dim=1)
    lo, hi = (torch.stack(each, dim=1) for each in zip(*map(extremes, parts), strict=True))
    return scale_and_zero(lo, hi, bits, symmetric)


def spread(values: Tensor, w: Tensor, granularity: str, group: int) -> Tensor:
    """The scales or zero points of `weight_grid`, one for each entry of w (N, K)."""
    n, k = w.shape
    return values.repeat_interleave(groups(k, granularity, group), dim=1)[:, :k].expand(n, k)


def round_weights(
    w: Tensor,
    bits: int | str,
    granularity: str = "channel",
    group: int = 64,
    symmetric: bool = True,
    extremes: Extremes = minmax,
) -> tuple[Tensor, Tensor, Tensor]:
    """Round w (N, K) to the nearest: q (N, K) in float32, scales and zero points as from `weight_grid`."""
    scale, zero = weight_grid(w, bits, granularity, group, symmetric, extremes)
    s, z = (spread(value, w, granularity, group) for value in (scale, zero))
    return to_grid(w, s, z, bits, symmetric), scale, zero
