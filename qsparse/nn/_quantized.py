"""What the layers of quantized weights share. Each adds its own arithmetic."""

from __future__ import annotations

from typing import Self

import torch

from qsparse.nn._common import InferenceLinear, check_sizes, check_tensors


class QuantizedLinear(InferenceLinear):
    """A layer whose weights are stored quantized.

    Empty, it holds zeros ``weight (N, K)`` of dtype ``stored``, ones ``weight_scale (N,)`` float32, and ``bias (N,)``.
    """

    weight: torch.Tensor
    weight_scale: torch.Tensor

    def __init__(
        self, in_features: int, out_features: int, bias: bool, activation: str | None, stored, dtype=torch.float32
    ):
        check_sizes(in_features=in_features, out_features=out_features)
        weight = torch.zeros(out_features, in_features, dtype=stored)
        buffers = {"weight": weight, "weight_scale": torch.ones(out_features)}
        super().__init__(in_features, out_features, bias, activation, dtype, **buffers)


class QuantizedInputLinear(QuantizedLinear):
    """A layer that also quantizes its input: each row by its own scale ("dynamic"), or all by ``input_scale (1,)``."""

    input_scale: torch.Tensor | None
    _stored = torch.int8

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        activations: str = "dynamic",
    ):
        super().__init__(in_features, out_features, bias, activation, self._stored)
        if activations not in ("dynamic", "static"):
            raise ValueError(f'activations must be "dynamic" or "static", got {activations!r}')
        self.register_buffer("input_scale", torch.ones(1) if activations == "static" else None)

    @classmethod
    def _holding(cls, weight, weight_scale, bias, activation, input_scale) -> Self:
        """A layer that holds these very arrays, and a copy of the bias in float32."""
        check_tensors(weight=weight, weight_scale=weight_scale)
        n, k = weight.shape
        layer = cls(k, n, bias is not None, activation, "dynamic" if input_scale is None else "static")
        layer.weight, layer.weight_scale, layer.input_scale = weight, weight_scale, input_scale
        if bias is not None:
            layer.bias = bias.detach().float().clone()
        return layer

    @property
    def activations(self) -> str:
        return "dynamic" if self.input_scale is None else "static"

    def describe(self) -> dict:
        return {**super().describe(), "activations": self.activations}
