"""A whole int8 network: quantize, multiply, scale, layer after layer."""

import numpy as np

from qsparse.oracles.gemm_int8 import gemm_int8
from qsparse.oracles.quantize_rows import quantize_rows


def mlp_int8(x, weights, weight_scales, biases, *, input_scales=None):
    """The logits (M, N) float32, every step rounded to float32; a ReLU follows every layer but the last."""
    last = len(weights) - 1
    scales = input_scales or (None,) * len(weights)
    for i, (w, scale_w, bias, scale) in enumerate(zip(weights, weight_scales, biases, scales, strict=True)):
        if i and scale is not None:  # between layers of int8 what is infinite is clipped, and NaN stays
            x = np.clip(x, -np.finfo(np.float32).max, np.finfo(np.float32).max)
        q, scale_x = quantize_rows(x, None if scale is None else scale[0])
        x = gemm_int8(q, w, scale_x, scale_w, bias, relu=i < last)
    return x
