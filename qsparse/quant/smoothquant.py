"""SmoothQuant: move what is large in some inputs of a layer into its weights, where each channel has its own scale.

Source: G. Xiao et al., "SmoothQuant: Accurate and Efficient Post-Training Quantization for Large Language Models" (ICML
2023), equations 3 and 4. There the division goes into the normalisation before the layer; here it goes into the layer
before, which a ReLU lets through. The first layer has none before it, and stays.
"""

import torch
from torch import Tensor

from qsparse.models import MLP

ALPHA = 0.5
_SMALLEST = 1e-5  # of both maxima: an input that is nearly never there moves nothing


def smoothing(X: Tensor, W: Tensor, alpha: float = ALPHA) -> Tensor:
    """``s_j = max|X_j|^alpha / max|W_j|^(1 - alpha)`` of inputs X (S, K) and weights W (N, K); (K,), positive.

    ``(X / s) @ (W * s).T`` is ``X @ W.T``. Where an input or its weights are all (nearly) zero, s is 1.
    """
    x, w = X.abs().amax(dim=0), W.abs().amax(dim=0)
    usable = (x > _SMALLEST) & (w > _SMALLEST)
    return torch.where(usable, x.clamp(min=_SMALLEST) ** alpha / w.clamp(min=_SMALLEST) ** (1 - alpha), 1)


@torch.no_grad()
def migrate(model: MLP, inputs: dict[str, Tensor], alpha: float = ALPHA) -> MLP:
    """A model of the same outputs (up to rounding) whose layers after the first have smoother inputs.

    model: dense, float32. inputs: of each layer, X (S, K).
    """
    model = model.replace({})
    layers = model.layers()
    for before, (name, layer) in zip(layers.values(), list(layers.items())[1:], strict=False):
        s = smoothing(inputs[name], layer.weight, alpha)
        before.weight /= s[:, None]
        if before.bias is not None:
            before.bias /= s
        layer.weight *= s
    return model
