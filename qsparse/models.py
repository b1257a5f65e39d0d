"""The multilayer perceptron that everything is measured on."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from numbers import Integral

import torch

from qsparse import nn
from qsparse.data import normalize
from qsparse.nn._common import chained

FLOATS = (torch.float32, torch.float16, torch.bfloat16)


class MLP(torch.nn.Module):
    """Fully connected layers named ``fc1``, ``fc2``, ..., each but the last followed by a ReLU.

    Parameters
    ----------
    sizes : sequence of int
        Widths from input to output, such as ``(784, 256, 10)``; at least two.
    seed : int
        Of the initial weights: PyTorch's own initialisation of ``nn.Linear``, drawn on the CPU, so the same on every
        device.

    Calling it with images ``(M, sizes[0])``, as uint8 pixels (normalised here) or as normalised floats, gives logits
    ``(M, sizes[-1])`` float32. Raises TypeError and ValueError for sizes and images that are none.
    """

    def __init__(self, sizes: Sequence[int], *, seed: int = 0):
        super().__init__()
        if not (isinstance(sizes, Sequence) and all(isinstance(size, Integral) for size in sizes)):
            raise TypeError(f"sizes must be a sequence of integers, got {sizes!r}")
        if len(sizes) < 2 or any(size < 1 for size in sizes):
            raise ValueError(f"sizes must be at least two positive widths, got {tuple(sizes)}")
        last = len(sizes) - 1
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            for i in range(1, last + 1):
                activation = "relu" if i < last else None
                self.add_module(f"fc{i}", nn.Linear(sizes[i - 1], sizes[i], activation=activation))

    def layers(self) -> dict[str, torch.nn.Module]:
        """The layers by name, from input to output."""
        return dict(self.named_children())

    @property
    def sizes(self) -> tuple[int, ...]:
        layers = list(self.children())
        return (layers[0].in_features, *(layer.out_features for layer in layers))

    @property
    def input_dtype(self) -> torch.dtype:
        """The float dtype that the first layer computes in; int8 layers take float32 and quantize it themselves."""
        return input_dtype_of(next(self.children()))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        layers = list(self.children())
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"x must be a torch.Tensor, got {type(x).__name__}")
        if x.ndim == 0 or x.shape[-1] != layers[0].in_features:
            raise ValueError(f"x must have shape (M, {layers[0].in_features}), got {tuple(x.shape)}")
        if x.dtype == torch.uint8:
            x = normalize(x, self.input_dtype)
        if nn.is_quant_network(layers):
            return nn.quant_network(layers, x if x.dtype in FLOATS else x.float())
        x = layers[0](x.to(input_dtype_of(layers[0])))
        with chained():
            for layer in layers[1:]:
                x = layer(x.to(input_dtype_of(layer)))
        return x.float()

    def cpu_kernel(self) -> str:
        """What computes the layers on a CPU, as a result row shows it. (On a GPU a row shows what was launched.)"""
        return ", ".join(dict.fromkeys(layer.cpu_kernel() for layer in self.children()))

    def replace(self, layers: dict[str, torch.nn.Module]) -> MLP:
        """A copy with some layers replaced; this model is left as it was and shares nothing with the copy."""
        unknown = layers.keys() - self.layers().keys()
        if unknown:
            raise ValueError(f"no layer named {', '.join(sorted(unknown))}; there are {', '.join(self.layers())}")
        return _of_layers({name: copy.deepcopy(layers.get(name, layer)) for name, layer in self.layers().items()})

    def describe(self) -> dict:
        """What ``from_description`` needs to make an empty model of the same layers."""
        return {
            "sizes": list(self.sizes),
            "layers": {name: layer.describe() for name, layer in self.layers().items()},
        }


def from_description(description: dict) -> MLP:
    """An empty model as ``MLP.describe()`` described it, ready for ``load_state_dict(strict=True)``."""
    return _of_layers({name: nn.from_description(layer) for name, layer in description["layers"].items()})


def _of_layers(layers: dict[str, torch.nn.Module]) -> MLP:
    model = MLP.__new__(MLP)
    torch.nn.Module.__init__(model)
    for name, layer in layers.items():
        model.add_module(name, layer)
    return model


def input_dtype_of(layer: torch.nn.Module) -> torch.dtype:
    """The float dtype of the activations that a layer takes."""
    if isinstance(layer, nn.WeightOnlyLinear | nn.EntryLinear):
        return layer.dtype
    weight = layer.values if hasattr(layer, "values") else layer.weight
    return weight.dtype if weight.is_floating_point() else torch.float32
