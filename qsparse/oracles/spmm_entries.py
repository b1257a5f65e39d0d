"""Weights in tiles of entries times activations."""

import numpy as np


def dense(entries, offsets, shape, dtype):
    """The matrix (N, K) in float64, entry by entry; see qsparse/kernels/_weight_tiles_sm80.py for the layout.

    ``dtype``: "float16" or "bfloat16".
    """
    n, k = shape
    wide = -(-k // 64)
    w = np.zeros((-(-n // 32) * 32, wide * 64))
    for tile in range(len(offsets) - 1):
        for word in np.asarray(entries).view(np.uint32)[4 * int(offsets[tile]) : 4 * int(offsets[tile + 1])]:
            at, bits = int(word >> 17), np.uint32(word & 0xFFFF)
            fragment, lane, element = at // 256, at // 8 % 32, at % 8
            row = fragment // 4 * 16 + lane // 4 + element // 2 % 2 * 8
            column = fragment // 2 % 2 * 32 + lane % 4 * 8 + fragment % 2 * 4 + element // 4 * 2 + element % 2
            value = np.uint16(bits).view(np.float16) if dtype == "float16" else (bits << np.uint32(16)).view(np.float32)
            w[tile // wide * 32 + row, tile % wide * 64 + column] = value
    return w[:n, :k]


def spmm_entries(x, entries, offsets, bias=None, *, shape, dtype, relu=False):
    """``act(x @ W.T + bias)`` in float64."""
    y = np.asarray(x, np.float64) @ dense(entries, offsets, shape, dtype).T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
