"""Magnitude pruning: a weight matters as much as it is large.

Han et al., "Learning both Weights and Connections for Efficient Neural Networks", 2015; one threshold over all layers
as in Frankle & Carbin, "The Lottery Ticket Hypothesis", 2019. Symbols:

    W_l  (N_l, K_l)  weights of layer l
    n    = sum over l of N_l * K_l, the number of weights of all layers together
    d    in (0, 1], the density asked for
    k    = round(d * n), the number of weights that stay (a half rounds to the even neighbour)
    m_l  (N_l, K_l)  bool, True where the weight stays; the m_l hold exactly k True together

The k weights of the largest |w| stay. Of equal |w| the one in the earlier layer stays, and within a layer the one with
the lower flat index (row by row).
"""

import torch
from torch import Tensor

from qsparse.errors import UserError
from qsparse.sparse.config import check_density
from qsparse.sparse.distribution import layer_counts
from qsparse.sparse.masks import check_by_layer, largest, warn_of_empty


def magnitude_scores(w: Tensor) -> Tensor:
    """|W| (N, K)."""
    return w.detach().abs()


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
        TypeError: weights are no dict of tensors.
    """
    check_by_layer("weights", weights)
    density = check_density(density)
    for name, weight in weights.items():
        if bool(torch.isnan(weight).any()):
            raise UserError(f"The weight of layer {name} holds NaN, which has no magnitude to prune by.")
    scores = {name: magnitude_scores(weight) for name, weight in weights.items()}
    counts = layer_counts(scores, density, "global")
    masks = {name: largest(score, counts[name]) for name, score in scores.items()}
    warn_of_empty(masks)
    return masks
