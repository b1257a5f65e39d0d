"""The fp8 layer: weights and activations as 8-bit floats (e4m3), each channel and each row with a scale of its own."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.nn._common import check_tensors
from qsparse.nn._quantized import QuantizedInputLinear

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class Fp8Linear(QuantizedInputLinear):
    """``y = act(x @ W.T + bias)`` in e4m3, for inference.

    ``weight (N, K)`` uint8 holds the bits of e4m3 numbers, which with ``weight_scale (N,)`` float32 stand for W. Of
    ``x (..., K)`` (float32, float16 or bfloat16) each row gets its own scale, absmax / 448 ("dynamic"), or all have
    ``input_scale (1,)`` float32 ("static"): then what lies beyond 448 scales is clipped. The output is float32.
    """

    _stored = torch.uint8

    @classmethod
    def from_numbers(cls, q, weight_scale, bias=None, activation=None, input_scale=None) -> Fp8Linear:
        """A layer of weights rounded already: e4m3 numbers q (N, K) of any float dtype, scales (N,), bias (N,)."""
        check_tensors(q=q)
        weight = q.to(FP8).contiguous().view(torch.uint8)
        return cls._holding(weight, weight_scale, bias, activation, input_scale)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        x, scale = x.float(), self.input_scale
        if scale is None:
            absmax = x.abs().amax(dim=1) if x.shape[1] else x.new_zeros(x.shape[0])
            scale = absmax / LARGEST
            scale = torch.where(scale < _SMALLEST_NORMAL, 1, scale)  # NaN stays NaN
        q = (x / scale[:, None]).clamp_(-LARGEST, LARGEST).to(FP8)  # a true division; ties to even; NaN stays NaN
        relu = self.activation == "relu"
        return kernels.gemm_fp8(q, self.weight, scale, self.weight_scale, self.bias, relu=relu, out_dtype=torch.float32)

    def cpu_kernel(self) -> str:
        return "gemm_fp8:cpu (float32)"
