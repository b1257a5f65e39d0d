"""COO weights times dense activations."""

import numpy as np


def spmm_coo(x, values, rows, cols, bias=None, *, shape, relu=False):
    """``act(x @ W.T + bias)`` in float64, entry by entry, so that duplicates add up."""
    x = np.asarray(x, np.float64)
    y = np.zeros((len(x), shape[0]))
    for value, n, k in zip(values, rows, cols, strict=True):
        y[:, n] += float(value) * x[:, k]
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
