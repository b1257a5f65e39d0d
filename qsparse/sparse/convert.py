"""Dense model and masks -> a model that stores and computes what the masks keep."""

from torch import Tensor

from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear, SparseLinear
from qsparse.sparse.config import FORMATS
from qsparse.sparse.formats import to_coo, to_csr


def prunable_weights(model: MLP) -> dict[str, Tensor]:
    """Layer name -> weight (N, K) of every layer of a dense `model`, in order. Biases are never pruned.

    Raises:
        UserError: a layer is already compressed, or holds NaN or Inf; the message names it.
    """
    return {name: layer.weight.detach() for name, layer in dense_layers(model, "sparsify").items()}


def sparsify(model: MLP, masks: dict[str, Tensor], format: str = "csr") -> MLP:
    """A copy of `model` that stores the weights where `masks` are True, and nothing of the others.

    Args:
        model: dense; its own values at the masked-out places do not matter. Left as it was.
        masks: layer name -> bool (N, K), for every layer (as from `magnitude_masks`).
        format: "csr" or "coo".

    Raises:
        UserError: an unknown format, a model that is already compressed or holds NaN or Inf.
        ValueError: the masks' names or shapes are not the layers'.
        TypeError: a mask is not bool.
    """
    if format not in FORMATS:
        raise UserError(f"Unknown sparse format {format!r}; the valid ones are {', '.join(FORMATS)}.")
    layers = dense_layers(model, "sparsify")
    if masks.keys() != layers.keys():
        raise ValueError(f"masks must name the layers {', '.join(layers)}, not {', '.join(masks) or 'none'}")
    return model.replace({name: _to_sparse(layer, masks[name], format) for name, layer in layers.items()})


def _to_sparse(layer: Linear, mask: Tensor, format: str) -> SparseLinear:
    compress, build = {"csr": (to_csr, SparseLinear.from_csr), "coo": (to_coo, SparseLinear.from_coo)}[format]
    bias = None if layer.bias is None else layer.bias.detach().clone()
    arrays = compress(layer.weight, mask.to(layer.weight.device))
    return build(*arrays, shape=tuple(layer.weight.shape), bias=bias, activation=layer.activation)
