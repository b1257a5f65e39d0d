"""int8 matrix product with 2:4 weights and range-based scaling."""

import numpy as np


def gemm_int8_24(x, values, metadata, scale_x=None, scale_w=None, bias=None, *, relu=False, zero_x=None, bare=False):
    """``act(((float32) acc * scale_x) * scale_w + bias)``, every step rounded to float32; ``bare``: acc as int64.

    The sums run over the kept weights, whose columns the metadata names.
    """
    x, values, metadata = (np.asarray(a) for a in (x, values, metadata))
    x = x.astype(np.float64)
    if zero_x is not None:
        x = x - np.asarray(zero_x, np.float64).reshape(-1, 1)
    x = np.pad(x, ((0, 0), (0, values.shape[1] * 2 - x.shape[1])))
    acc = np.zeros((x.shape[0], values.shape[0]))
    for n, row in enumerate(values):
        nibbles = np.stack([metadata[n] & 15, metadata[n] >> 4], axis=1).ravel()
        columns = 4 * np.arange(nibbles.size)[:, None] + np.stack([nibbles & 3, nibbles >> 2], axis=1)
        acc[:, n] = x[:, columns.ravel()] @ row.astype(np.float64)  # exact: integers below 2^53
    if bare:
        return acc.astype(np.int64)
    y = acc.astype(np.float32)
    for factor, shape in ((scale_x, (-1, 1)), (scale_w, (1, -1))):
        if factor is not None:
            y = y * np.asarray(factor, np.float32).reshape(shape)
    if bias is not None:
        y = y + np.asarray(bias, np.float32)
    return np.where(y < 0, np.float32(0), y) if relu else y
