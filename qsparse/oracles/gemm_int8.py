"""int8 matrix product with range-based scaling."""

import numpy as np


def accumulator(x, w):
    """The exact integers ``x @ w.T`` as int64, for int8 ``x (M, K)``, ``w (N, K)``.

    Multiplied in float64, which is exact while no sum leaves 2^53: up to K = 5 * 10^11.
    """
    return (np.asarray(x, np.float64) @ np.asarray(w, np.float64).T).astype(np.int64)


def gemm_int8(x, w, scale_x=None, scale_w=None, bias=None, *, relu=False):
    """``act(((float32) acc * scale_x) * scale_w + bias)``, every step rounded to float32."""
    y = accumulator(x, w).astype(np.float32)
    with np.errstate(invalid="ignore", over="ignore"):
        if scale_x is not None:
            y = y * np.broadcast_to(np.asarray(scale_x, np.float32), y.shape[:1])[:, None]
        if scale_w is not None:
            y = y * np.broadcast_to(np.asarray(scale_w, np.float32), y.shape[1:])
        if bias is not None:
            y = y + np.asarray(bias, np.float32)
    return np.where(y < 0, np.float32(0), y) if relu else y
