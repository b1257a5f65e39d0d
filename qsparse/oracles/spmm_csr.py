"""CSR weights times dense activations."""

import numpy as np


def spmm_csr(x, values, col_indices, row_offsets, bias=None, *, shape, relu=False):
    """``act(x @ W.T + bias)`` in float64, entry by entry; what is not stored is never touched."""
    x = np.asarray(x, np.float64)
    y = np.zeros((len(x), shape[0]))
    for n in range(shape[0]):
        for i in range(row_offsets[n], row_offsets[n + 1]):
            y[:, n] += float(values[i]) * x[:, col_indices[i]]
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
