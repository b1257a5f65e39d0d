"""The int8 layer (W8A8): weights quantized per output channel, activations when they arrive."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import torch

from qsparse import kernels
from qsparse.kernels.gemm_int8 import cpu_method
from qsparse.nn._common import by_rows
from qsparse.nn._quantized import QuantizedInputLinear


class QuantLinear(QuantizedInputLinear):
    """``y = act(x @ W.T + bias)`` in int8, for inference.

    ``weight (N, K)`` int8 and ``weight_scale (N,)`` float32 stand for ``W = weight_scale[:, None] * weight``. Of
    ``x (..., K)`` (float32, float16 or bfloat16) each row gets its own scale (``activations="dynamic"``), or all have
    ``input_scale (1,)`` float32 ("static"): then what lies beyond 127 scales is clipped. A row that holds NaN or Inf
    gives NaN. The product is exact in integers, and the output is float32.
    """

    _numbers: tuple[list, bool] | None = None  # what `_gives_numbers` found, and of which tensors

    @classmethod
    def from_linear(cls, linear) -> QuantLinear:
        """Quantize a dense layer's weights; its bias stays float32. The dense layer is not changed."""
        return cls.from_integers(*kernels.quantize_rows(linear.weight.detach()), linear.bias, linear.activation)

    @classmethod
    def from_integers(cls, weight, weight_scale, bias=None, activation=None, input_scale=None) -> QuantLinear:
        """A layer of weights quantized already: int8 (N, K) with scales (N,), bias (N,), and ``input_scale (1,)``."""
        return cls._holding(weight, weight_scale, bias, activation, input_scale)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        options = {"scale_x": self.input_scale, "relu": self.activation == "relu"}
        return kernels.linear_int8(x, self.weight, self.weight_scale, self.bias, **options)

    def cpu_kernel(self) -> str:
        return f"gemm_int8:cpu ({cpu_method()})"


def is_quant_network(layers: Sequence[torch.nn.Module]) -> bool:
    """Whether ``quant_network`` computes these layers: int8 ones, all but the last with a ReLU, that nobody watches.

    Between layers with static scales int8 holds no NaN, so there a scale or a bias that is none excludes them.
    """
    return (
        all(type(layer) is QuantLinear for layer in layers)
        and not any(layer._forward_pre_hooks or layer._forward_hooks for layer in layers)
        and [layer.activation for layer in layers] == ["relu"] * (len(layers) - 1) + [None]
        and all(_gives_numbers(layer) for layer, after in itertools.pairwise(layers) if after.input_scale is not None)
    )


def _gives_numbers(layer: QuantLinear) -> bool:
    """Whether the scales and the bias are finite, asked again when they change; taken for granted inside a graph."""
    if torch.compiler.is_compiling():
        return True
    parts = [part for part in (layer.weight_scale, layer.bias) if part is not None]
    seen = [(part.data_ptr(), 0 if part.is_inference() else part._version) for part in parts]
    known = layer._numbers
    if known is None or known[0] != seen:
        if layer.weight_scale.is_cuda and torch.cuda.is_current_stream_capturing():
            return True
        known = layer._numbers = seen, all(bool(part.isfinite().all()) for part in parts)
    return known[1]


def quant_network(layers: Sequence[QuantLinear], x: torch.Tensor) -> torch.Tensor:
    """The layers one after the other, with the same bits; on a GPU in one launch where that is faster."""
    names = ("weight", "weight_scale", "bias", "input_scale")
    weights, scales, biases, input_scales = ([getattr(layer, name) for layer in layers] for name in names)
    return by_rows(x, lambda x: kernels.mlp_int8(x, weights, scales, biases, input_scales=input_scales))
