"""The dense layer: trains and infers on our GEMM on a GPU, on PyTorch's on a CPU."""

from __future__ import annotations

import torch
from torch.nn import functional

from qsparse import kernels
from qsparse.nn._common import by_rows, check_activation, check_sizes, describe, options_of


class Linear(torch.nn.Linear):
    """``y = act(x @ weight.T + bias)``, a ``torch.nn.Linear`` with its activation fused.

    Parameters
    ----------
    in_features, out_features : int
    bias : bool
    activation : None or "relu"
    dtype : torch.float32, float16 or bfloat16
        Of the weights; ``x (..., in_features)`` must have it too. Sums are held in float32.
    """

    def __init__(self, in_features, out_features, bias=True, activation=None, *, device=None, dtype=torch.float32):
        check_sizes(in_features=in_features, out_features=out_features)
        check_activation(activation)
        super().__init__(in_features, out_features, bias, device=device, dtype=dtype)
        self.activation = activation

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        relu = self.activation == "relu"
        if x.is_cuda:
            return by_rows(x, lambda rows: _LinearFunction.apply(rows, self.weight, self.bias, relu))
        y = functional.linear(x, self.weight, self.bias)
        return functional.relu(y) if relu else y

    def cpu_kernel(self) -> str:
        return "gemm:cpu"

    def describe(self) -> dict:
        return describe(self, self.weight.dtype)

    @classmethod
    def from_description(cls, options: dict) -> Linear:
        return cls(**options_of(options))


class _LinearFunction(torch.autograd.Function):
    """Forward and backward in our kernels. The backward products take transposed views; nothing is copied."""

    @staticmethod
    def forward(ctx, x, weight, bias, relu):
        y = kernels.gemm(x, weight, bias, relu=relu)
        ctx.save_for_backward(x, weight, y if relu else None)
        return y

    @staticmethod
    def backward(ctx, dy):
        x, weight, y = ctx.saved_tensors
        dz, dbias = kernels.bias_relu_grad(dy.resolve_neg(), y)  # a complex loss may give a negative view
        needs_x, needs_weight, needs_bias, _ = ctx.needs_input_grad
        dx = kernels.gemm(dz, weight.t()) if needs_x else None
        dweight = kernels.gemm(dz.t(), x.t()) if needs_weight else None
        return dx, dweight, dbias if needs_bias else None, None
