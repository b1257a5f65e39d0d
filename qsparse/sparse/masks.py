"""Scores in, masks out: which weights stay, once each has a score and it is settled how many stay.

A mask is bool, of the weights' shape (N, K), True where the weight stays. The largest scores stay; of equal scores the
one with the lower flat index (row by row) stays. So every count is exact, also where all scores are equal.
"""

import math
import warnings
from collections.abc import Mapping

import torch
from torch import Tensor


class EmptyLayerWarning(UserWarning):
    """Pruning left a layer without a single weight: its output no longer depends on its input."""


def largest(scores: Tensor, count: int) -> Tensor:
    """The mask (of `scores`' shape) of its `count` largest entries."""
    order = torch.sort(scores.flatten(), descending=True, stable=True).indices
    mask = torch.zeros(scores.numel(), dtype=torch.bool, device=scores.device)
    mask[order[:count]] = True
    return mask.reshape(scores.shape)


def largest_of_each_row(scores: Tensor, count: int) -> Tensor:
    """The mask (N, K) of `count` entries, the largest of each row: count // N in each, one more in the first count % N.

    Raises ValueError when count is above N * K.
    """
    n, k = scores.shape
    if not 0 <= count <= n * k:
        raise ValueError(f"count must be from 0 to {n * k}, not {count}")
    quotas = torch.full((n, 1), count // max(n, 1), device=scores.device)
    quotas[: count % max(n, 1)] += 1
    return _rank(scores) < quotas


def largest_of_each_group(scores: Tensor, n: int, m: int) -> Tensor:
    """The n:m mask (N, K): of each m consecutive entries of a row the n largest. A shorter last group keeps up to n."""
    rows, k = scores.shape
    padded = scores.new_full((rows, math.ceil(k / m) * m), -math.inf)
    padded[:, :k] = scores
    return (_rank(padded.reshape(rows, -1, m)) < n).reshape(rows, -1)[:, :k]


def warn_of_empty(masks: dict[str, Tensor], stacklevel: int = 2) -> None:
    """Give an EmptyLayerWarning for each layer that keeps none of its weights, naming it."""
    for name, mask in masks.items():
        if mask.numel() and not bool(mask.any()):
            warnings.warn(
                f"Pruning to density {mask_density(masks):.3g} leaves layer {name} without any of its "
                f"{mask.numel():,} weights: its output is its bias, whatever the input. Choose a higher density, or "
                "give each layer a --min-density.",
                EmptyLayerWarning,
                stacklevel=stacklevel + 1,
            )


def mask_density(masks: dict[str, Tensor]) -> float:
    """The fraction of weights that stay, over all layers (NaN when there are no weights).

    masks: layer name -> bool (N, K). Raises TypeError for anything but a dict of tensors.
    """
    check_by_layer("masks", masks)
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / total if total else math.nan


def check_by_layer(what: str, values: object) -> None:
    """Raise TypeError unless `values` is layer name -> tensor."""
    if not isinstance(values, Mapping):
        raise TypeError(f"{what} must be a dict from a layer's name to a tensor, not {type(values).__name__}")
    for name, value in values.items():
        if not isinstance(value, Tensor):
            raise TypeError(f"{what} of layer {name} must be a torch.Tensor, not {type(value).__name__}")


def check_masks(masks: object, layers: Mapping[str, torch.nn.Linear]) -> None:
    """Raise TypeError or ValueError unless `masks` is layer name -> bool, of the shapes of the layers' weights."""
    if not isinstance(masks, Mapping):
        raise TypeError(
            f"masks must be a SparseConfig, or a dict from a layer's name to a bool tensor, not {type(masks).__name__} "
            f"({masks!r:.40}); a density is SparseConfig(0.1)"
        )
    if masks.keys() != layers.keys():
        raise ValueError(f"masks must name the layers {', '.join(layers)}, not {', '.join(map(str, masks)) or 'none'}")
    for name, layer in layers.items():
        mask = masks[name]
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = mask.dtype if isinstance(mask, Tensor) else type(mask).__name__
            raise TypeError(f"the mask of layer {name} must be bool, a torch.Tensor, not {kind}")
        if mask.shape != layer.weight.shape:
            raise ValueError(
                f"the mask of layer {name} and its weight must be of one shape, not {tuple(mask.shape)} and "
                f"{tuple(layer.weight.shape)}"
            )


def _rank(scores: Tensor) -> Tensor:
    """The place of each entry along the last dimension, 0 for the largest, equal ones in the order they stand."""
    return scores.argsort(dim=-1, descending=True, stable=True).argsort(dim=-1)
