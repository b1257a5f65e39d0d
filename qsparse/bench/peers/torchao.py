"""torchao's int8 layers, compiled as its documentation asks, where it is installed."""

from __future__ import annotations

import copy
import functools
import importlib.util
import warnings

import torch
from torch import Tensor

from qsparse.bench.harness import Call
from qsparse.bench.peers.pytorch import compiled

SCHEMES = {"torchao": "Int8DynamicActivationInt8WeightConfig", "torchao_int8wo": "Int8WeightOnlyConfig"}
"""Peer's name -> torchao's: int8 weights with activations quantized row by row, or left as they are."""
_DIVISOR = 8  # of the outputs: torchao's int8 layers of other widths leave the GPU


def installed() -> bool:
    return importlib.util.find_spec("torchao") is not None


def quantized(model: torch.nn.Module, peer: str) -> torch.nn.Module:
    """A copy of a model whose Linear layers are torchao's; a narrow head stays as it is."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of its imports and renamings
        from torchao import quantization

        model = copy.deepcopy(model)
        config = getattr(quantization, SCHEMES[peer])()
        quantization.quantize_(model, config, filter_fn=_is_wide)
    return model


def _is_wide(module: torch.nn.Module, name: str) -> bool:
    return isinstance(module, torch.nn.Linear) and module.out_features % _DIVISOR == 0


def int8_layers(x: Tensor, w: Tensor, bias: Tensor, compile: str, peer: str) -> dict[str, Call]:
    """relu(x @ w.T + bias) by one of `SCHEMES`, float16 in and out; nothing without torchao or without compiling."""
    if compile == "off" or not installed():
        return {}
    linear = torch.nn.Linear(w.shape[1], w.shape[0], device=w.device, dtype=w.dtype)
    with torch.no_grad():
        linear.weight.copy_(w)
        linear.bias.copy_(bias)
    model = quantized(torch.nn.Sequential(linear, torch.nn.ReLU()).eval(), peer)
    return {peer: Call(functools.partial(compiled(model, compile), x), torch.inference_mode)}
