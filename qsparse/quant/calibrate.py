"""A model and images in; what reaches each layer, and the range of it, out."""

import warnings
from collections.abc import Mapping

import torch
from torch import Tensor

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant import ranges
from qsparse.quant.config import QuantConfig

_CHUNK = 1024  # rows at a time


def observer(config: QuantConfig) -> ranges.MinMax:
    """A new observer of `config.calibration` (not "fixed"), for one tensor."""
    return {
        "minmax": ranges.MinMax,
        "percentile": lambda: ranges.Percentile(config.percentile),
        "mse": lambda: ranges.Mse(config.bits, config.symmetric),
        "entropy": lambda: ranges.Entropy(config.bits),
        "lsq": lambda: ranges.Lsq(config.bits),
    }[config.calibration]()


def sample(images: Tensor, samples: int) -> Tensor:
    """At most `samples` rows of images (S, K), chosen without order: data may come sorted by label. Always the same."""
    if not isinstance(images, Tensor):
        raise TypeError(f"calibration_data must be a torch.Tensor of images (S, K), got {type(images).__name__}")
    if images.dim() != 2:
        raise ValueError(f"calibration_data must have shape (S, K), got {tuple(images.shape)}")
    if not len(images):
        raise UserError(
            "There are no calibration data: they are the validation split, so train with --validation above 0."
        )
    if len(images) <= samples:
        return images
    chosen = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))[:samples]
    return images[chosen.to(images.device)]


@torch.inference_mode()
def layer_ranges(model: MLP, images: Tensor, configs: Mapping[str, QuantConfig]) -> dict[str, tuple[float, float]]:
    """The range of a layer's input when the float `model` sees images (S, K), uint8 or normalised floats.

    configs: what the layers with static activations are asked to be, by name; they look at the same images.

    Warns:
        CalibrationWarning: a layer saw only zeros, or values that percentile ignored; the message names the layer.

    Raises:
        UserError: NaN or Inf reached a layer (percentile ignores them), or there are no images.
    """
    observers = {name: observer(config) for name, config in configs.items()}
    samples = max(config.calibration_samples for config in configs.values())
    for chunk in sample(images, samples).split(_CHUNK):
        inputs = layer_inputs(model, chunk)
        for name, one in observers.items():
            try:
                one.see(inputs[name])
            except ValueError as error:
                raise _refusal(name, error) from None
    return {name: _range(name, one) for name, one in observers.items()}


def sampled_inputs(model: MLP, images: Tensor, config: QuantConfig) -> dict[str, Tensor]:
    """What reaches each layer when the float `model` sees a sample of images (S, K): name -> X, float32.

    Raises UserError, naming the layer, where that holds NaN or Inf.
    """
    inputs = layer_inputs(model, sample(images, config.calibration_samples))
    for name, x in inputs.items():
        if bad := int((~torch.isfinite(x)).sum()):
            raise _refusal(name, f"{bad:,} of its values are NaN or Inf")
    return inputs


@torch.no_grad()
def layer_inputs(model: MLP, images: Tensor) -> dict[str, Tensor]:
    """What reaches each layer of `model` when it sees images (S, K): name -> X (S, K of the layer), float32."""
    inputs: dict[str, Tensor] = {}

    def keep(name):
        return lambda _, arguments: inputs.update({name: arguments[0].float()})

    handles = [layer.register_forward_pre_hook(keep(name)) for name, layer in model.layers().items()]
    try:
        model(images)
    finally:
        for handle in handles:
            handle.remove()
    return inputs


def _range(name: str, one: ranges.MinMax) -> tuple[float, float]:
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        try:
            found = one.range()
        except ValueError as error:
            raise _refusal(name, error) from None
    for warning in caught:
        warnings.warn(f"Calibration of layer {name}: {warning.message}.", ranges.CalibrationWarning, stacklevel=4)
    return found


def _refusal(name: str, error: ValueError | str) -> UserError:
    return UserError(f"Calibration of layer {name}: {error}.")
