"""Symmetric int8 quantization of each row."""

import numpy as np


def quantize_rows(x):
    """``(q int8, scale float32)`` of ``x (M, K)``, one row after the other, in float32 arithmetic."""
    x = np.asarray(x, np.float32)
    q = np.zeros(x.shape, np.int8)
    scale = np.empty(len(x), np.float32)
    for m, row in enumerate(x):
        largest = np.max(np.abs(row), initial=np.float32(0))
        if not np.isfinite(row).all():
            scale[m] = np.nan
            continue
        scale[m] = np.float32(largest) / np.float32(127)
        if scale[m] < np.finfo(np.float32).smallest_normal:
            scale[m] = 1
        q[m] = np.clip(np.rint(row / scale[m]), -127, 127)
    return q, scale
