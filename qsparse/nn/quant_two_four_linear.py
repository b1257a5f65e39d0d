"""Both at once: int8 weights in 2:4 storage, activations quantized when they arrive."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _two_four
from qsparse.nn._common import check_tensors, describe
from qsparse.nn.two_four_linear import TwoFourLinear

_FEW = 16
"""Outputs, as of a network's head: the weights are written out, and the rows are quantized and multiplied at once."""


class QuantTwoFourLinear(TwoFourLinear):
    """``y = act(x @ W.T + bias)`` with W in 2:4 storage and in int8, for inference.

    ``values (N, Kp / 2)`` int8 and ``metadata`` are as ``kernels.gemm_int8_24`` takes them. ``weight_scale (N,)``
    float32, one an output: row n of W is ``weight_scale[n]`` times its values. Each row of ``x (..., K)`` (float32,
    float16 or bfloat16) gets its own scale, absmax / 127; one that holds NaN or Inf gives NaN. The product is exact in
    integers and the output float32: the bits of a ``QuantLinear`` of the same weights.
    """

    weight_scale: torch.Tensor

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None) -> None:
        super().__init__(in_features, out_features, bias, activation, dtype=torch.float32)
        self.values = self.values.to(torch.int8)
        self.register_buffer("weight_scale", torch.ones(out_features))

    @classmethod
    def from_integers(cls, values, metadata, weight_scale, *, shape, bias=None, activation=None) -> QuantTwoFourLinear:
        """From int8 ``values`` with scales (N,); ValueError for bad metadata."""
        check_tensors(values=values, metadata=metadata, weight_scale=weight_scale)
        n, k = shape
        layer = cls(k, n, bias is not None, activation)
        bias = None if bias is None else bias.detach().float().clone()
        return layer._holding(values=values, metadata=metadata, weight_scale=weight_scale, bias=bias)

    @property
    def activations(self) -> str:
        return "dynamic"

    def _reals(self) -> torch.Tensor:
        return self.values.float() * self.weight_scale[:, None]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        relu = self.activation == "relu"
        if x.is_cuda and self.out_features <= _FEW:
            w = _two_four.expand(self.values, self.metadata, self.in_features)
            return kernels.linear_int8(x, w, self.weight_scale, self.bias, relu=relu)
        q, scale = kernels.quantize_rows(x)
        return kernels.gemm_int8_24(q, self.values, self.metadata, scale, self.weight_scale, self.bias, relu=relu)

    def cpu_kernel(self) -> str:
        return "gemm_int8_24:cpu"

    def describe(self) -> dict:
        return describe(self)
