"""What can be compressed: a model's dense layers, checked once for every compressor."""

import torch

from qsparse.errors import UserError
from qsparse.models import FLOATS, MLP
from qsparse.nn import Linear


def dense_layers(model: MLP, verb: str) -> dict[str, Linear]:
    """The layers of `model` in order, if each is dense with finite weights.

    Args:
        model: the model to compress.
        verb: what is about to happen ("quantize", "sparsify"), for the message.

    Raises:
        TypeError: the model is none of ours.
        UserError: a layer is already quantized or sparse, holds NaN or Inf, or numbers that no kernel takes; the
            message names the layer.
    """
    if not isinstance(model, MLP):
        raise TypeError(f"model must be a qsparse.models.MLP, as qsparse.load returns, got {type(model).__name__}")
    for name, layer in model.layers().items():
        if not isinstance(layer, Linear):
            raise UserError(
                f"Cannot {verb} this model: its layer {name} is already compressed ({type(layer).__name__}). "
                "Start from the dense model of the run."
            )
        if layer.weight.dtype not in FLOATS:
            dtype = str(layer.weight.dtype).removeprefix("torch.")
            raise UserError(
                f"Cannot {verb} this model: its layer {name} holds {dtype}, and not float32, float16 or bfloat16."
            )
        _check_finite(name, layer)
    return model.layers()


def _check_finite(name: str, layer: Linear) -> None:
    for what, tensor in layer.named_parameters():
        bad = int((~torch.isfinite(tensor)).sum())
        if bad:
            raise UserError(
                f"The {what} of layer {name} holds {bad:,} values that are NaN or Inf (of {tensor.numel():,}); "
                "train the model again, with a lower --lr if it diverged."
            )
