"""Random pruning: the floor that every other pruner has to beat."""

import torch
from torch import Tensor


def random_scores(weights: dict[str, Tensor], seed: int) -> dict[str, Tensor]:
    """Layer name -> float64 (N_l, K_l), independent and uniform in [0, 1), drawn on the CPU: on every device the same.

    weights: layer name -> (N_l, K_l); only shapes and devices matter. seed: one seed, one result.
    """
    generator = torch.Generator().manual_seed(seed)
    return {
        name: torch.rand(weight.shape, generator=generator, dtype=torch.float64).to(weight.device)
        for name, weight in weights.items()
    }
