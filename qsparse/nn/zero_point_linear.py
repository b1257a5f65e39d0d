"""The int8 layer whose activations have a zero point: all 256 values for what is not symmetric, as after a ReLU."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels.gemm_int8 import cpu_method
from qsparse.nn._quantized import QuantizedInputLinear


class ZeroPointLinear(QuantizedInputLinear):
    """``y = act(x @ W.T + bias)`` with ``x ~ scale * (q - zero)``, q in 0..255, and symmetric int8 weights.

    The weights, their scales and the bias are those of a `QuantLinear`. ``weight_sums (N,)`` int32 holds the sums of
    the rows of the weights. Of ``x (..., K)`` each row gets its own scale and zero point ("dynamic"), or all have
    ``input_scale (1,)`` float32 and ``input_zero (1,)`` int32 ("static"): what lies beyond 0..255 is then clipped. A
    row that holds NaN or Inf gives NaN. The product is exact in integers, and the output is float32.
    """

    weight_sums: torch.Tensor
    input_zero: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        activations: str = "dynamic",
    ):
        super().__init__(in_features, out_features, bias, activation, activations)
        self.register_buffer("weight_sums", torch.zeros(out_features, dtype=torch.int32))
        self.register_buffer("input_zero", torch.zeros(1, dtype=torch.int32) if activations == "static" else None)

    @classmethod
    def from_integers(cls, weight, weight_scale, bias=None, activation=None, grid=None) -> ZeroPointLinear:
        """A layer of int8 weights (N, K) with scales (N,), bias (N,); grid: a scale and a zero point, (1,) each."""
        scale, zero = (None, None) if grid is None else grid
        layer = cls._holding(weight, weight_scale, bias, activation, scale)
        layer.weight_sums = weight.sum(1, dtype=torch.int32)
        if zero is not None:
            layer.input_zero = zero.to(torch.int32)
        return layer

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        if self.input_scale is None:
            q, scale, zero = kernels.quantize_rows(x, symmetric=False)
        else:
            q, scale, zero = self._static(x.float())
        options = {"relu": self.activation == "relu", "zero_x": zero, "sums_w": self.weight_sums}
        return kernels.gemm_int8(q, self.weight, scale, self.weight_scale, self.bias, **options)

    def _static(self, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """``clamp(rint(x / scale) + zero, 0, 255)``; the scale of a row that holds NaN or Inf is NaN."""
        q = ((x / self.input_scale).round_() + self.input_zero).clamp_(0, 255).nan_to_num_(0).to(torch.uint8)
        return q, torch.where(x.isfinite().all(dim=1), self.input_scale, torch.nan), self.input_zero

    def cpu_kernel(self) -> str:
        return f"gemm_int8:cpu ({cpu_method()})"
