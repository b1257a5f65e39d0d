"""Dense float32 model -> the same model in 16 bits, in int8, or rounded to few bits in simulation."""

import copy
from collections.abc import Collection

import torch
from torch import Tensor

from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear
from qsparse.quant.bias_correction import corrected_bias
from qsparse.quant.calibrate import layer_ranges, sampled_inputs
from qsparse.quant.config import BITS, QuantConfig
from qsparse.quant.gptq import gptq
from qsparse.quant.ranges import Fixed
from qsparse.quant.schemes import round_weights, scale_and_zero, spread, to_reals
from qsparse.quant.simulate import SimulatedLinear
from qsparse.quant.smoothquant import migrate

_HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}


def quantize(
    model: MLP,
    config: str | QuantConfig,
    calibration_data: Tensor | None = None,
    *,
    only: Collection[str] | None = None,
) -> MLP:
    """A copy of `model` with every layer, the head included, as `config` says; `model` is left as it was.

    Args:
        model: dense, float32.
        config: a `QuantConfig`, or a dtype alone: "fp16" or "bf16" (weights, biases and activations in 16 bits, sums in
            float32), or "int8": symmetric weights with one scale per output channel, absmax / 127, and activations
            quantized row by row as they come (scale absmax / 127 of the row). An output channel of zeros stays zeros.
        calibration_data: images (S, K), uint8 pixels or normalised floats, not of the test split, for a `config` that
            looks at data (static activations, any method but absmax); `config.calibration_samples` of them are used.
        only: names of the layers to quantize, such as {"fc1"}; the others stay as they are.

    Warns:
        CalibrationWarning: the data say little about a layer.

    Raises:
        UserError: unknown dtype, a model that is already quantized or sparse, a weight that is NaN or Inf or that
            does not fit `dtype`, calibration data that are missing or not finite; the message names the layer.
    """
    if isinstance(config, str):
        config = QuantConfig(config)
    layers = dense_layers(model, "quantize")
    for name, layer in layers.items():
        if layer.weight.dtype != torch.float32:
            raise UserError(
                f"Cannot quantize this model: its layer {name} is already {_name(layer.weight.dtype)}. "
                "Start from the float32 model of the run."
            )
    if unknown := set(only or ()) - layers.keys():
        raise UserError(f"There is no layer {', '.join(sorted(unknown))}; the layers are {', '.join(layers)}.")
    chosen = [name for name in layers if only is None or name in only]
    if config.dtype not in BITS:
        return model.replace({name: _to_half(name, layers[name], _HALVES[config.dtype]) for name in chosen})
    if config.needs_data and calibration_data is None:
        raise UserError("This quantization looks at calibration data and was given none.")
    inputs: dict[str, Tensor] = {}
    if config.method == "smoothquant":
        model = migrate(model, sampled_inputs(model, calibration_data, config))
    elif config.method != "absmax":
        inputs = sampled_inputs(model, calibration_data, config)
    ranges: dict[str, tuple[float, float]] = {}
    if config.calibration == "fixed":
        ranges = dict.fromkeys(layers, Fixed(*config.range).range())
    elif config.static:
        ranges = layer_ranges(model, calibration_data, config)
    layers = model.layers()  # those that were made smooth
    return model.replace(
        {name: _to_integers(layers[name], config, ranges.get(name), inputs.get(name)) for name in chosen}
    )


@torch.no_grad()
def _to_integers(
    layer: Linear, config: QuantConfig, input_range: tuple[float, float] | None, X: Tensor | None
) -> torch.nn.Module:
    """One layer with rounded weights; computed in integers, or, in simulation, in float32. X: its inputs, (S, K)."""
    w = layer.weight.detach()
    scheme = (config.bits, config.granularity, config.group, config.symmetric)
    q, scale, zero = gptq(w, X, *scheme) if config.method == "gptq" else round_weights(w, *scheme)
    grid = None
    if input_range is not None:
        lo, hi = (torch.tensor([extreme], device=w.device) for extreme in input_range)
        grid = scale_and_zero(lo, hi, config.bits, config.symmetric)

    def build(bias: Tensor | None, activation: str | None) -> torch.nn.Module:
        if not config.simulate:
            scales = scale.expand(len(w), 1).reshape(-1).contiguous()
            return QuantLinear.from_integers(q.to(torch.int8), scales, bias, activation, grid and grid[0])
        s, z = (spread(value, w, config.granularity, config.group) for value in (scale, zero))
        bits = None if config.weights_only else config.bits
        return SimulatedLinear(to_reals(q, s, z), bias, activation, bits, grid, config.symmetric)

    bias = layer.bias
    if config.method == "bias-correction":
        exact = torch.nn.functional.linear(X, w, bias)
        bias = corrected_bias(bias, exact, build(bias, None)(X))
    return build(bias, layer.activation)


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
