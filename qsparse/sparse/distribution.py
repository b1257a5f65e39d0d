"""How many weights each layer keeps, so that all of them together keep exactly k = round(d * n).

    global   as many as are among the k largest scores of all layers together (Frankle & Carbin, "The Lottery Ticket
             Hypothesis", 2019)
    uniform  the fraction d of each layer
    erk      Erdős-Rényi-kernel (Mocanu et al., 2018; Evci et al., "Rigging the Lottery", 2020): N_l + K_l weights of
             layer l, times one epsilon for all layers; a layer that this would fill is dense

n is the number of all weights, d the density, N_l x K_l the shape of layer l. A half rounds to the even neighbour.
Fractions of a weight go to the layers that lost the largest ones, of equal ones to the earlier.
"""

import math

import torch
from torch import Tensor

from qsparse.errors import UserError
from qsparse.sparse.config import DISTRIBUTIONS, check_density, choose
from qsparse.sparse.masks import check_by_layer


def layer_counts(scores: dict[str, Tensor], density: float, distribution: str, min_density: float = 0.0) -> dict:
    """Layer name -> number of weights that it keeps; their sum is exactly round(density * n).

    Args:
        scores: layer name -> (N_l, K_l) float, larger for a weight that matters more; only `global` reads the values.
        density: d, in (0, 1].
        distribution: "global", "uniform" or "erk".
        min_density: each layer keeps at least round(min_density * N_l * K_l), and at least 1 where it is above 0.

    Raises:
        UserError: these least counts together are more than round(d * n), a density outside (0, 1], or a distribution
            that is none.
        TypeError: scores are no dict of tensors.
    """
    check_by_layer("scores", scores)
    choose("distribution", distribution, DISTRIBUTIONS)
    density = check_density(density)
    sizes = {name: score.numel() for name, score in scores.items()}
    kept = round(density * sum(sizes.values()))
    least = {name: min(size, max(1, round(min_density * size))) if min_density else 0 for name, size in sizes.items()}
    if sum(least.values()) > kept:
        raise UserError(
            f"Density {density:g} keeps {kept:,} weights of {sum(sizes.values()):,}, and min_density {min_density:g} "
            f"asks for {sum(least.values()):,}: choose a higher density, or a lower min_density."
        )
    if distribution == "global":
        return _global(scores, kept, least)
    shares = {name: size if distribution == "uniform" else sum(scores[name].shape) for name, size in sizes.items()}
    return _shared(kept, shares, least, sizes)


def _global(scores: dict[str, Tensor], kept: int, least: dict[str, int]) -> dict[str, int]:
    """Each layer's own largest `least` stay whatever the others hold; the rest is ranked over all layers."""
    if not scores:
        return {}
    flat = torch.cat([score.flatten() for score in scores.values()])
    layer = torch.cat([torch.full((score.numel(),), i) for i, score in enumerate(scores.values())]).to(flat.device)
    order = torch.sort(flat, descending=True, stable=True).indices
    layer = layer[order]
    free = torch.ones_like(layer, dtype=torch.bool)
    for i, count in enumerate(least.values()):
        free[(layer == i).nonzero().flatten()[:count]] = False
    won = layer[free][: kept - sum(least.values())]
    return {name: least[name] + int((won == i).sum()) for i, name in enumerate(scores)}


def _shared(kept: int, shares: dict[str, int], least: dict[str, int], most: dict[str, int]) -> dict[str, int]:
    """Whole counts in proportion to `shares`, each within [least, most], that sum to `kept`."""

    def exact(epsilon: float) -> dict[str, float]:
        return {name: min(max(epsilon * share, least[name]), most[name]) for name, share in shares.items()}

    low, high = 0.0, max((most[name] / share for name, share in shares.items() if share), default=0.0)
    for _ in range(200):  # the sum grows with epsilon, so halving finds the one that fits
        middle = (low + high) / 2
        low, high = (middle, high) if sum(exact(middle).values()) < kept else (low, middle)
    wanted = exact(high)
    counts = {name: math.floor(count) for name, count in wanted.items()}
    for name in sorted(counts, key=lambda name: counts[name] - wanted[name]):
        if sum(counts.values()) < kept and counts[name] < most[name]:
            counts[name] += 1
    return counts
