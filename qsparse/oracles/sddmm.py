"""The product of two dense matrices at the entries of a sparse one."""

import numpy as np


def sddmm(dy, x, col_indices, row_offsets):
    """``(dy.T @ x)[n, k]`` in float64 for each entry, one after the other."""
    dy, x = np.asarray(dy, np.float64), np.asarray(x, np.float64)
    out = np.zeros(len(col_indices))
    for n in range(len(row_offsets) - 1):
        for i in range(row_offsets[n], row_offsets[n + 1]):
            out[i] = np.sum(dy[:, n] * x[:, col_indices[i]])
    return out
