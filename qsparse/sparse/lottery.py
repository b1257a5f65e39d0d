"""Lottery tickets: what pruning a trained network keeps is trained anew, from the weights that it began with.

Frankle & Carbin, "The Lottery Ticket Hypothesis: Finding Sparse, Trainable Neural Networks", 2019 (one-shot pruning,
section 2). Symbols:

    theta_0  the weights before the training
    m        the mask of the trained weights that a pruner keeps
    m * theta_0 is then trained, and m holds
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsparse.models import MLP


def rewind(initial: MLP, masks: dict[str, Tensor]) -> MLP:
    """m * theta_0: a copy of `initial`, dense, with zeros where `masks` (layer name -> (N, K) bool) are False.

    Biases are those of `initial`. Raises ValueError unless the masks are of its layers and their shapes.
    """
    shapes = {name: layer.weight.shape for name, layer in initial.layers().items()}
    if {name: mask.shape for name, mask in masks.items()} != shapes:
        raise ValueError(f"masks must be of the layers {', '.join(shapes)} and of the shapes of their weights")
    ticket = initial.replace({})
    with torch.no_grad():
        for name, layer in ticket.layers().items():
            layer.weight.masked_fill_(~masks[name].to(layer.weight.device), 0.0)
    return ticket
