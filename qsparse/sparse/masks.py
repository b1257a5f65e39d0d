"""Which weights stay: masks from weights, arrays in and arrays out.

Global magnitude pruning (Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015; one
threshold over all layers as in Frankle & Carbin, "The Lottery Ticket Hypothesis", 2019). Symbols:

    W_l  (N_l, K_l)  weights of layer l
    n    = sum over l of N_l * K_l, the number of weights of all layers together
    d    in (0, 1], the density asked for
    k    = round(d * n), the number of weights that stay (a half rounds to the even neighbour)
    m_l  (N_l, K_l)  bool, True where the weight stays; the m_l hold exactly k True together

The k weights of the largest |w| stay. Of equal |w| the one in the earlier layer stays, and within a layer the one with
the lower flat index (row by row).
"""

import math
import warnings

import torch
from torch import Tensor

from qsparse.errors import UserError


class EmptyLayerWarning(UserWarning):
    """Pruning left a layer without a single weight: its output no longer depends on its input."""


def check_density(density: float) -> float:
    """`density` as a float; raises UserError unless it lies in (0, 1] (NaN does not)."""
    density = float(density)
    if not 0.0 < density <= 1.0:
        raise UserError(
            f"The density must be above 0 and at most 1 (1 keeps every weight), not {density:g}; "
            "for 90 % sparsity give 0.1."
        )
    return density


def magnitude_masks(weights: dict[str, Tensor], density: float) -> dict[str, Tensor]:
    """The masks m_l that keep the k largest weights of all layers together.

    Args:
        weights: layer name -> W_l (N_l, K_l), any floating dtype, in the model's order, all on one device.
        density: d.

    Returns:
        layer name -> m_l (N_l, K_l) bool on the weights' device.

    Warns:
        EmptyLayerWarning: for each layer that loses all its weights, naming it.

    Raises:
        UserError: d outside (0, 1], or a NaN weight; the message names the layer.
    """
    density = check_density(density)
    for name, weight in weights.items():
        if bool(torch.isnan(weight).any()):
            raise UserError(f"The weight of layer {name} holds NaN, which has no magnitude to prune by.")
    if not weights:
        return {}
    magnitudes = torch.cat([weight.detach().abs().flatten() for weight in weights.values()])
    kept = round(density * magnitudes.numel())
    # A stable sort leaves equal magnitudes in the order in which they stand: that is the rule for ties.
    order = torch.sort(magnitudes, descending=True, stable=True).indices
    stays = torch.zeros_like(magnitudes, dtype=torch.bool)
    stays[order[:kept]] = True
    parts = stays.split([weight.numel() for weight in weights.values()])
    masks = {name: part.reshape(weights[name].shape) for name, part in zip(weights, parts, strict=True)}
    for name, mask in masks.items():
        if mask.numel() and not bool(mask.any()):
            warnings.warn(
                f"Pruning to density {density:g} leaves layer {name} without any of its {mask.numel():,} weights: "
                "its output is its bias, whatever the input. Choose a higher density.",
                EmptyLayerWarning,
                stacklevel=2,
            )
    return masks


def mask_density(masks: dict[str, Tensor]) -> float:
    """The fraction of weights that stay, over all layers (NaN when there are no weights)."""
    total = sum(mask.numel() for mask in masks.values())
    return sum(int(mask.sum()) for mask in masks.values()) / total if total else math.nan
