"""Dense matrix product with bias and ReLU."""

import numpy as np


def gemm(x, w, bias=None, *, relu=False):
    """``act(x @ w.T + bias)`` in float64 for ``x (M, K)``, ``w (N, K)``, ``bias (N,)``."""
    y = np.asarray(x, np.float64) @ np.asarray(w, np.float64).T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
