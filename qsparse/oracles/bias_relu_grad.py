"""Backward of bias and ReLU."""

import numpy as np


def bias_relu_grad(dy, y=None):
    """``(dz, db)`` in float64 for ``dy (M, N)`` and the layer's output ``y (M, N)``."""
    dz = np.array(dy, np.float64)
    if y is not None:
        dz[~(np.asarray(y, np.float64) > 0)] = 0
    return dz, dz.sum(axis=0)
