"""Dense float32 model -> the same model in fewer bits, for kernels or in simulation."""

import copy
from dataclasses import dataclass

import torch
from torch import Tensor

from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Fp8Linear, Linear, QuantLinear, WeightOnlyLinear, ZeroPointLinear
from qsparse.quant.bias_correction import corrected_bias
from qsparse.quant.calibrate import layer_ranges, sampled_inputs
from qsparse.quant.config import HALVES, QuantConfig
from qsparse.quant.equalisation import equalise
from qsparse.quant.gptq import gptq
from qsparse.quant.ranges import Fixed
from qsparse.quant.schemes import round_weights, scale_and_zero, spread, to_reals
from qsparse.quant.simulate import SimulatedLinear
from qsparse.quant.smoothquant import migrate
from qsparse.quant.weight_ranges import extremes

_TORCH = {"fp16": torch.float16, "bf16": torch.bfloat16}

Grid = tuple[Tensor, Tensor]
"""Scale and zero point, (1,) float32 each, of all inputs of a layer."""


def quantize(model: MLP, config: str | QuantConfig, calibration_data: Tensor | None = None) -> MLP:
    """A copy of `model` with every layer, the head included, as `config` says; `model` is left as it was.

    Args:
        model: dense, float32.
        config: a `QuantConfig`, or a dtype alone: "fp16" or "bf16" (weights, biases and activations in 16 bits, sums in
            float32), or "int8": symmetric weights with one scale per output channel, absmax / 127, and activations
            quantized row by row as they come (scale absmax / 127 of the row). An output channel of zeros stays zeros.
        calibration_data: images (S, K), uint8 pixels or normalised floats, not of the test split, for a `config` that
            looks at data (static activations; gptq, smoothquant, bias-correction); `config.calibration_samples` of
            them are used.

    Warns:
        CalibrationWarning: the data say little about a layer.

    Raises:
        TypeError, ValueError: an argument of another type, images of another shape.
        UserError: unknown dtype, a layer that is not there, a model that is already quantized or sparse, a weight that
            is NaN or Inf or that does not fit `dtype`, calibration data that are missing or not finite; the message
            names the layer.
    """
    if isinstance(config, str):
        config = QuantConfig(config)
    if not isinstance(config, QuantConfig):
        raise TypeError(f"config must be a QuantConfig or the name of a dtype, got {type(config).__name__}")
    if config.qat_epochs:
        raise UserError("--qat-epochs trains: call qsparse.quant.train_quantized, which takes training images too.")
    prepared = prepare(model, config, calibration_data)
    layers = prepared.model.layers()
    quantized = {
        name: to_half(name, layers[name], one.dtype)
        if one.dtype in HALVES
        else _rounded(layers[name], one, prepared.grids.get(name), prepared.inputs.get(name))
        for name, one in prepared.configs.items()
    }
    return prepared.model.replace(quantized)


@dataclass(frozen=True)
class Prepared:
    """What is settled before any layer is rounded.

    model: dense, float32, the ranges of its layers balanced if that was asked. configs: what each layer that is to be
    quantized is asked to be. grids: of the inputs of layers with static activations. inputs: name -> X (S, K), of the
    layers of methods that look at them.
    """

    model: MLP
    configs: dict[str, QuantConfig]
    grids: dict[str, Grid]
    inputs: dict[str, Tensor]


def prepare(model: MLP, config: QuantConfig, calibration_data: Tensor | None) -> Prepared:
    """Check `model`, and settle what must be known of all layers at once. Raises and warns as `quantize`."""
    layers = dense_layers(model, "quantize")
    for name, layer in layers.items():
        if layer.weight.dtype != torch.float32:
            raise UserError(
                f"Cannot quantize this model: its layer {name} is already {_name(layer.weight.dtype)}. "
                "Start from the float32 model of the run."
            )
    if unknown := dict(config.layers).keys() - layers.keys():
        raise UserError(f"There is no layer {', '.join(sorted(unknown))}; the layers are {', '.join(layers)}.")
    configs = {name: one for name in layers if (one := config.of(name)) is not None}
    if config.needs_data and calibration_data is None:
        raise UserError("This quantization looks at calibration data and was given none.")
    inputs: dict[str, Tensor] = {}
    if config.method == "equalisation":
        model = equalise(model)
    elif config.method == "smoothquant":
        model = migrate(model, sampled_inputs(model, calibration_data, config))
    elif config.method != "absmax":
        inputs = sampled_inputs(model, calibration_data, config)
    static = {name: one for name, one in configs.items() if one.static}
    ranges: dict[str, tuple[float, float]] = {}
    if static and config.calibration == "fixed":
        ranges = dict.fromkeys(static, Fixed(*config.range).range())
    elif static:
        ranges = layer_ranges(model, calibration_data, static)
    grids = {}
    for name, limits in ranges.items():
        lo, hi = (torch.tensor([extreme], device=layers[name].weight.device) for extreme in limits)
        grids[name] = scale_and_zero(lo, hi, static[name].bits, config.symmetric)
    return Prepared(model, configs, grids, inputs)


@torch.no_grad()
def _rounded(layer: Linear, config: QuantConfig, grid: Grid | None, X: Tensor | None) -> torch.nn.Module:
    """One layer with rounded weights; X: its inputs, (S, K)."""
    w, bias = layer.weight.detach(), layer.bias
    parts = gptq(w, X, *scheme(config)) if config.method == "gptq" else round_weights(w, *scheme(config))
    if config.method == "bias-correction":
        exact = torch.nn.functional.linear(X, w, bias)
        bias = corrected_bias(bias, exact, outputs(inference_layer(config, parts, bias, None, grid), X))
    return inference_layer(config, parts, bias, layer.activation, grid)


def scheme(config: QuantConfig) -> tuple:
    """The arguments of `round_weights` and `gptq` beyond the arrays."""
    return config.bits, config.granularity, config.group, config.symmetric_weights, extremes(config)


def inference_layer(
    config: QuantConfig,
    parts: tuple[Tensor, Tensor, Tensor],
    bias: Tensor | None,
    activation: str | None,
    grid: Grid | None,
) -> torch.nn.Module:
    """The layer of rounded weights: over its kernel, or, in simulation, in float32. parts: as from `round_weights`."""
    q, scale, zero = parts
    if config.simulate:
        s, z = (spread(value, q, config.granularity, config.group) for value in (scale, zero))
        bits = None if config.weights_only else config.bits
        return SimulatedLinear(to_reals(q, s, z), bias, activation, bits, grid, config.symmetric)
    if config.granularity == "group":
        return WeightOnlyLinear.from_integers(q, scale, bias, activation, config.bits, config.group)
    scales = scale.expand(len(q), 1).reshape(-1).contiguous()
    if config.weights_only:
        return WeightOnlyLinear.from_integers(q, scales, bias, activation, config.bits)
    input_scale = None if grid is None else grid[0]
    if config.dtype == "fp8":
        return Fp8Linear.from_numbers(q, scales, bias, activation, input_scale)
    if not config.symmetric:
        return ZeroPointLinear.from_integers(q.to(torch.int8), scales, bias, activation, grid)
    return QuantLinear.from_integers(q.to(torch.int8), scales, bias, activation, input_scale)


def outputs(layer: torch.nn.Module, x: Tensor) -> Tensor:
    """What a quantized layer makes of x (M, K), both in float32, whatever it computes in."""
    dtype = layer.dtype if isinstance(layer, WeightOnlyLinear) else torch.float32
    return layer(x.to(dtype)).float()


def to_half(name: str, layer: Linear, dtype: str) -> Linear:
    """A layer in "fp16" or "bf16". Raises UserError, naming it, where a number does not fit."""
    dtype = _TORCH[dtype]
    largest = max(float(tensor.detach().abs().max()) for tensor in layer.parameters() if tensor.numel())
    if largest > torch.finfo(dtype).max:
        raise UserError(
            f"Layer {name} does not fit {_name(dtype)}: it holds {largest:.3g}, "
            f"and the largest number there is {torch.finfo(dtype).max:.3g}. bf16 has float32's range."
        )
    return copy.deepcopy(layer).to(dtype)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
