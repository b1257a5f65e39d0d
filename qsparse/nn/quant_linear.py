"""The int8 layer (W8A8): weights quantized per output channel, activations per row when they arrive."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels.gemm_int8 import cpu_method
from qsparse.nn._common import by_rows, check_activation


class QuantLinear(torch.nn.Module):
    """``y = act(x @ W.T + bias)`` in int8, for inference.

    ``weight (N, K)`` int8 and ``weight_scale (N,)`` float32 stand for ``W = weight_scale[:, None] * weight``. Each row
    of ``x (..., K)`` (float32, float16 or bfloat16) gets its own scale; the product is exact in integers, and the
    output is float32.
    """

    activations = "dynamic"

    def __init__(self, in_features: int, out_features: int, bias: bool = True, activation: str | None = None):
        check_activation(activation)
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.int8))
        self.register_buffer("weight_scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)

    @classmethod
    def from_linear(cls, linear) -> QuantLinear:
        """Quantize a dense layer's weights; its bias stays float32. The dense layer is not changed."""
        layer = cls(linear.in_features, linear.out_features, linear.bias is not None, linear.activation)
        layer.weight, layer.weight_scale = kernels.quantize_rows(linear.weight.detach())
        if linear.bias is not None:
            layer.bias = linear.bias.detach().float().clone()
        return layer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = kernels.quantize_rows(x)
        relu = self.activation == "relu"
        return kernels.gemm_int8(q, self.weight, scale, self.weight_scale, self.bias, relu=relu)

    def cpu_kernel(self) -> str:
        return f"gemm_int8:cpu ({cpu_method()})"

    def describe(self) -> dict:
        return {
            "kind": "QuantLinear",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "activation": self.activation,
        }

    @classmethod
    def from_description(cls, options: dict) -> QuantLinear:
        return cls(**options)
