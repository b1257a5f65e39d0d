"""Weights in bitmap tiles times activations."""

import numpy as np


def dense(values, masks, offsets, shape):
    """The matrix (N, K) in float64, bit by bit; see qsparse/sparse/bitmap_tiles.py for the layout."""
    n, k = shape
    wide = -(-k // 128)
    w = np.zeros((-(-n // 16) * 16, wide * 128))
    for tile, words in enumerate(np.asarray(masks).view(np.uint32)):
        at = 8 * int(offsets[tile])
        for half in range(2):
            for q in range(4):
                for lane in range(32):
                    for bit in range(8):
                        if words[32 * half + lane] >> (8 * q + bit) & 1:
                            row = tile // wide * 16 + q % 2 * 8 + lane // 4
                            column = tile % wide * 128 + half * 64 + q // 2 * 32 + lane % 4 * 8 + bit
                            w[row, column] = values[at]
                            at += 1
    return w[:n, :k]


def spmm_bitmap(x, values, masks, offsets, bias=None, *, shape, relu=False):
    """``act(x @ W.T + bias)`` in float64."""
    y = np.asarray(x, np.float64) @ dense(values, masks, offsets, shape).T
    if bias is not None:
        y = y + np.asarray(bias, np.float64)
    return np.where(y < 0, 0, y) if relu else y
