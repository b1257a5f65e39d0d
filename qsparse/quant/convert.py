"""Dense float32 model -> the same model in 16 bits or in int8."""

import copy

import torch

from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = (*_HALVES, "int8")


def quantize(model: MLP, dtype: str) -> MLP:
    """A copy of `model` with every layer, the head included, in `dtype`; `model` is left as it was.

    Args:
        model: dense, float32.
        dtype: "fp16" or "bf16" (weights, biases and activations in 16 bits, sums in float32), or "int8": symmetric
            weights with one scale per output channel, absmax / 127, and activations quantized row by row as they come
            (scale absmax / 127 of the row). An output channel of zeros stays zeros.

    Raises:
        UserError: unknown dtype, a model that is already quantized or sparse, a weight that is NaN or Inf or that
            does not fit `dtype`; the message names the layer.
    """
    if dtype not in DTYPES:
        raise UserError(f"Unknown dtype {dtype!r}; the valid ones are {', '.join(DTYPES)}.")
    layers = dense_layers(model, "quantize")
    for name, layer in layers.items():
        if layer.weight.dtype != torch.float32:
            raise UserError(
                f"Cannot quantize this model: its layer {name} is already {_name(layer.weight.dtype)}. "
                "Start from the float32 model of the run."
            )
    if dtype == "int8":
        return model.replace({name: QuantLinear.from_linear(layer) for name, layer in layers.items()})
    return model.replace({name: _to_half(name, layer, _HALVES[dtype]) for name, layer in layers.items()})


def _to_half(name: str, layer: Linear, dtype: torch.dtype) -> Linear:
    largest = max(float(tensor.detach().abs().max()) for tensor in layer.parameters() if tensor.numel())
    if largest > torch.finfo(dtype).max:
        raise UserError(
            f"Layer {name} does not fit {_name(dtype)}: it holds {largest:.3g}, "
            f"and the largest number there is {torch.finfo(dtype).max:.3g}. bf16 has float32's range."
        )
    return copy.deepcopy(layer).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
