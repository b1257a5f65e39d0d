"""Matrix product with int8 or packed int4 weights."""

import numpy as np


def integers(w, k):
    """The weights' integers (N, k): themselves if int8, from bytes the low half first, each a two's complement."""
    w = np.asarray(w)
    if w.dtype == np.int8:
        return w.astype(np.int64)
    q = np.stack((w % 16, w // 16), axis=2).reshape(len(w), -1)[:, :k].astype(np.int64)
    return np.where(q >= 8, q - 16, q)


def gemm_weight_only(x, w, scale, bias=None, *, group=None, relu=False):
    """``act(x @ W.T + bias)`` in float64 with ``W[n, k] = scale[n, k // group] * q[n, k]`` (or ``scale[n]``)."""
    x, scale = np.asarray(x, np.float64), np.asarray(scale, np.float64)
    k = x.shape[1]
    columns = scale[:, None] if group is None else scale[:, np.arange(k) // group]
    y = x @ (integers(w, k) * columns).T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
