"""The fp8 layer: weights and activations as 8-bit floats (e4m3), each channel and each row with a scale of its own."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.nn._common import by_rows, check_activation

FP8 = torch.float8_e4m3fn
LARGEST = torch.finfo(FP8).max
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class Fp8Linear(torch.nn.Module):
    """``y = act(x @ W.T + bias)`` in e4m3, for inference.

    ``weight (N, K)`` uint8 holds the bits of e4m3 numbers, which with ``weight_scale (N,)`` float32 stand for W. Of
    ``x (..., K)`` (float32, float16 or bfloat16) each row gets its own scale, absmax / 448 ("dynamic"), or all have
    ``input_scale (1,)`` float32 ("static"): then what lies beyond 448 scales is clipped. The output is float32.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor
    bias: torch.Tensor | None
    input_scale: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        activations: str = "dynamic",
    ):
        check_activation(activation)
        if activations not in ("dynamic", "static"):
            raise ValueError(f'activations must be "dynamic" or "static", got {activations!r}')
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        self.register_buffer("weight", torch.zeros(out_features, in_features, dtype=torch.uint8))
        self.register_buffer("weight_scale", torch.ones(out_features))
        self.register_buffer("bias", torch.zeros(out_features) if bias else None)
        self.register_buffer("input_scale", torch.ones(1) if activations == "static" else None)

    @classmethod
    def from_numbers(cls, q, weight_scale, bias=None, activation=None, input_scale=None) -> Fp8Linear:
        """A layer of weights rounded already: e4m3 numbers q (N, K) of any float dtype, scales (N,), bias (N,)."""
        n, k = q.shape
        layer = cls(k, n, bias is not None, activation, "dynamic" if input_scale is None else "static")
        layer.weight = q.to(FP8).contiguous().view(torch.uint8)
        layer.weight_scale, layer.input_scale = weight_scale, input_scale
        if bias is not None:
            layer.bias = bias.detach().float().clone()
        return layer

    @property
    def activations(self) -> str:
        return "dynamic" if self.input_scale is None else "static"

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

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

    def describe(self) -> dict:
        return {
            "kind": "Fp8Linear",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "activation": self.activation,
            "activations": self.activations,
        }

    @classmethod
    def from_description(cls, options: dict) -> Fp8Linear:
        return cls(**options)
