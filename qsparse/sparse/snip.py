"""SNIP: a weight matters as much as the loss would change without it, to first order.

Lee et al., "SNIP: Single-shot Network Pruning based on Connection Sensitivity", 2019. Symbols:

    L    the mean cross-entropy of one batch of training images
    c    one factor for each weight, all 1: L(c * W)
    g_ij = dL/dc_ij = W_ij * dL/dW_ij
    S_ij = |g_ij|  (the paper divides by the sum over all weights, which ranks alike)

The paper prunes a network before it is trained. Here the network is trained, so gradients are small and scores are
those of what training left; see the experiments for how it then compares.
"""

import torch
from torch import Tensor

from qsparse import nn
from qsparse.models import MLP


def snip_scores(model: MLP, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Layer name -> S (N_l, K_l) float32 of a dense `model`, on one batch.

    images: uint8 (M, 784), or normalised floats. labels: int64 (M,). All on the model's device. `model` is left alone.
    """
    weights = {name: layer.weight for name, layer in model.layers().items()}
    with torch.enable_grad():
        gradients = torch.autograd.grad(nn.cross_entropy(model(images), labels), list(weights.values()))
    return {
        name: (weight.detach().float() * gradient.float()).abs()
        for (name, weight), gradient in zip(weights.items(), gradients, strict=True)
    }
