"""int8 matrix product with range-based scaling."""

import numpy as np


def accumulator(x, w, zero_x=None):
    """The exact integers ``(x - zero_x) @ w.T`` as int64, for 8-bit ``x (M, K)`` and ``w (N, K)``, ``zero_x (M,)``.

    Multiplied in float64, which is exact while no sum leaves 2^53: up to K = 2 * 10^11.
    """
    x, w = np.asarray(x, np.float64), np.asarray(w, np.float64)
    if zero_x is not None:
        x = x - np.asarray(zero_x, np.float64).reshape(-1, 1)
    return (x @ w.T).astype(np.int64)


def gemm_int8(x, w, scale_x=None, scale_w=None, bias=None, *, relu=False, zero_x=None, scale_y=None, out_dtype=None):
    """``act(((float32) acc * scale_x) * scale_w + bias)``, every step rounded to float32.

    With ``scale_y`` clipped and rounded to ``out_dtype`` int8 or uint8 again.
    """
    y = accumulator(x, w, zero_x).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore", divide="ignore"):
        if scale_x is not None:
            y = y * np.broadcast_to(np.asarray(scale_x, np.float32), y.shape[:1])[:, None]
        if scale_w is not None:
            y = y * np.broadcast_to(np.asarray(scale_w, np.float32), y.shape[1:])
        if bias is not None:
            y = y + np.asarray(bias, np.float32)
        y = np.where(y < 0, np.float32(0), y) if relu else y
        if scale_y is None:
            return y
        quotients = np.rint(y / np.float32(scale_y))
    low = -127 if np.dtype(out_dtype) == np.int8 else 0
    return np.where(np.isnan(quotients), 0, np.clip(quotients, low, low + 254 + (low == 0))).astype(out_dtype)
