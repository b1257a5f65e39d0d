"""Range -> scale and zero point -> integers, and back: ``x ~ scale * (q - zero_point)``.

Source: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only Inference"
(CVPR 2018), equation 1.
"""

import torch
from torch import Tensor

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


def limits(bits: int, symmetric: bool = True) -> tuple[int, int]:
    """The smallest and the largest integer: (-127, 127) of 8 bits, (0, 255) where not symmetric."""
    return (1 - 2 ** (bits - 1), 2 ** (bits - 1) - 1) if symmetric else (0, 2**bits - 1)


def scale_and_zero(lo: Tensor, hi: Tensor, bits: int, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Scale and zero point (integers in float32) of ranges ``lo <= hi``, float32 of any shape; 0 is always included.

    Symmetric: ``max(|lo|, |hi|) / (2^(bits-1) - 1)`` and 0. Else ``(hi - lo) / (2^bits - 1)`` and the integer nearest
    to ``-lo / scale``, so that 0 is exact. Where the scale would be below the smallest normal float32 it is 1, and the
    zero point 0.
    """
    lo, hi = lo.float().clamp(max=0), hi.float().clamp(min=0)
    q_min, q_max = limits(bits, symmetric)
    scale = torch.maximum(-lo, hi) / q_max if symmetric else hi / q_max - lo / q_max  # hi - lo could overflow
    usable = scale >= _SMALLEST_NORMAL
    scale = torch.where(usable, scale, 1)
    zero = torch.zeros_like(scale) if symmetric else (-lo / scale).round().clamp(q_min, q_max)
    return scale, torch.where(usable, zero, 0)


def to_integers(x: Tensor, scale: Tensor, zero: Tensor, bits: int, symmetric: bool = True) -> Tensor:
    """``clamp(rint(x / scale) + zero)`` as integers in float32: a true division, ties to even."""
    return ((x / scale).round() + zero).clamp(*limits(bits, symmetric))


def to_reals(q: Tensor, scale: Tensor, zero: Tensor) -> Tensor:
    """``scale * (q - zero)``."""
    return scale * (q - zero)


def groups(k: int, granularity: str, group: int) -> int:
    """Columns of `k` that share a scale; the last group may be short."""
    return min(group, k) if granularity == "group" else k


def weight_grid(w: Tensor, bits: int, granularity: str, group: int, symmetric: bool = True) -> tuple[Tensor, Tensor]:
    """Scales and zero points of the extremes of w (N, K): (1, 1) of a tensor, (N, 1) of channels, (N, G) of groups."""
    size = groups(w.shape[1], granularity, group)
    parts = w.split(size, dim=1) if w.shape[1] else [w.new_zeros(w.shape[0], 1)]
    lo = torch.stack([part.amin(dim=1) for part in parts], dim=1)
    hi = torch.stack([part.amax(dim=1) for part in parts], dim=1)
    if granularity == "tensor":
        lo, hi = lo.amin().reshape(1, 1), hi.amax().reshape(1, 1)
    return scale_and_zero(lo, hi, bits, symmetric)


def spread(values: Tensor, w: Tensor, granularity: str, group: int) -> Tensor:
    """The scales or zero points of `weight_grid`, one for each entry of w (N, K)."""
    n, k = w.shape
    return values.repeat_interleave(groups(k, granularity, group), dim=1)[:, :k].expand(n, k)


def round_weights(
    w: Tensor, bits: int, granularity: str = "channel", group: int = 64, symmetric: bool = True
) -> tuple[Tensor, Tensor, Tensor]:
    """Round w (N, K) to the nearest: integers in float32 (N, K), scales and zero points as from `weight_grid`."""
    scale, zero = weight_grid(w, bits, granularity, group, symmetric)
    s, z = (spread(value, w, granularity, group) for value in (scale, zero))
    return to_integers(w, s, z, bits, symmetric), scale, zero
