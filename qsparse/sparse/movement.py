"""Movement pruning: a weight matters when training moves it away from zero, however large it is.

Sanh, Wolf & Rush, "Movement Pruning: Adaptive Sparsity by Fine-Tuning", 2020. Symbols:

    W_t   the weights at step t of a training by plain gradient descent, L its mean cross-entropy
    S_ij = -sum over t of dL/dW_ij * W_ij, at step t: positive where the steps grow |W_ij| (the paper's learning rate of
           the scores only scales them)

The paper prunes while it fine-tunes, by scores that pruned weights go on collecting. Here a copy of the network takes
one pass over the calibration images, and all its weights collect; a gradual schedule does this anew at each look.
"""

from __future__ import annotations

import torch
from torch import Tensor

from qsparse import nn
from qsparse.models import MLP

_BATCH, _LR = 64, 0.01


def movement_scores(model: MLP, images: Tensor, labels: Tensor) -> dict[str, Tensor]:
    """Layer name -> S (N_l, K_l) float32 of a dense `model`, over one pass in batches of 64.

    images: uint8 (M, 784), or normalised floats. labels: int64 (M,). All on the model's device. `model` is left alone.
    """
    model = model.replace({})
    parameters = dict(model.named_parameters())
    scores = {name: torch.zeros_like(layer.weight, dtype=torch.float32) for name, layer in model.layers().items()}
    for x, y in zip(images.split(_BATCH), labels.split(_BATCH), strict=True):
        with torch.enable_grad():
            gradients = torch.autograd.grad(nn.cross_entropy(model(x), y), list(parameters.values()))
        with torch.no_grad():
            for (name, parameter), gradient in zip(parameters.items(), gradients, strict=True):
                layer, _, kind = name.rpartition(".")
                if kind == "weight":
                    scores[layer] -= (gradient * parameter).float()
                parameter -= _LR * gradient
    return {name: score.detach() for name, score in scores.items()}
