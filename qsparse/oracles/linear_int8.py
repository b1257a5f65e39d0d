"""An int8 layer of float activations: quantize, multiply, scale."""

from qsparse.oracles.gemm_int8 import gemm_int8
from qsparse.oracles.quantize_rows import quantize_rows


def linear_int8(x, w, scale_w, bias=None, *, scale_x=None, relu=False):
    """The outputs (M, N) float32, every step rounded to float32."""
    q, scale = quantize_rows(x, None if scale_x is None else scale_x[0])
    return gemm_int8(q, w, scale, scale_w, bias, relu=relu)
