"""Matrix product with 2:4 weights, bias and ReLU."""

import numpy as np


def gemm_24(x, values, metadata, bias=None, *, relu=False):
    """``act(x @ w.T + bias)`` in float64, over the kept weights alone, whose columns the metadata names."""
    values, metadata = np.asarray(values, np.float64), np.asarray(metadata)
    x = np.asarray(x, np.float64)
    x = np.pad(x, ((0, 0), (0, values.shape[1] * 2 - x.shape[1])))
    y = np.zeros((x.shape[0], values.shape[0]))
    for n, row in enumerate(values):
        nibbles = np.stack([metadata[n] & 15, metadata[n] >> 4], axis=1).ravel()
        columns = 4 * np.arange(nibbles.size)[:, None] + np.stack([nibbles & 3, nibbles >> 2], axis=1)
        y[:, n] = x[:, columns.ravel()] @ row
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
