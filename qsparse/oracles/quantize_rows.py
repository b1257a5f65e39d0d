"""8-bit quantization of each row."""

import numpy as np

F = np.float32


def quantize_rows(x, scale=None, *, symmetric=True, relu=False, return_sums=False):
    """``(q int8, scale float32)`` of ``x (M, K)``, one row after the other, in float32.

    Not symmetric: ``(q uint8, scale, zero_point int32)``. With ``return_sums`` the sums of ``q``, int32, come last.
    """
    x = np.asarray(x, np.float32)
    low, high = (-127, 127) if symmetric else (0, 255)
    q = np.zeros(x.shape, np.int8 if symmetric else np.uint8)
    scales, zeros = np.empty(len(x), np.float32), np.zeros(len(x), np.int32)
    for m, row in enumerate(np.where(x < 0, F(0), x) if relu else x):
        scales[m], zeros[m] = scale_and_zero(row, symmetric) if scale is None else (F(scale), 0)
        if not np.isfinite(row).all():
            scales[m], zeros[m] = np.nan, 0
            continue
        with np.errstate(invalid="ignore", divide="ignore", over="ignore"):
            quotients = np.rint(row / scales[m])
        quotients = np.where(np.isnan(quotients), 0, np.clip(quotients, -1e6, 1e6)).astype(np.int64)
        q[m] = np.clip(quotients + zeros[m], low, high)
    sums = (q.sum(axis=1, dtype=np.int32),) if return_sums else ()
    return (q, scales, *sums) if symmetric else (q, scales, zeros, *sums)


def scale_and_zero(row, symmetric):
    """Of one row's extremes; the range always includes 0."""
    with np.errstate(invalid="ignore", over="ignore"):
        low, high = np.min(row, initial=F(0)), np.max(row, initial=F(0))
        scale = max(-low, high) / F(127) if symmetric else high / F(255) - low / F(255)
        if scale < np.finfo(np.float32).smallest_normal:
            return F(1), 0
        zero = 0 if symmetric else np.nan_to_num(np.rint(-low / scale))
    return scale, min(int(zero), 255)
