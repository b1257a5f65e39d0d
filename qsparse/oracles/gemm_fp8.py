"""Matrix product of 8-bit floats, with range-based scaling."""

import numpy as np


def gemm_fp8(x, w, scale_x=None, scale_w=None, bias=None, *, relu=False):
    """``act((x @ w.T) * scale_x[:, None] * scale_w + bias)`` in float64; ``x`` and ``w`` as floats of e4m3 values."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    if scale_x is not None:
        y = y * np.broadcast_to(np.asarray(scale_x, np.float64), y.shape[:1])[:, None]
    if scale_w is not None:
        y = y * np.asarray(scale_w, np.float64)
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0.0, y) if relu else y
