"""Training with NumPy alone, forward and backward written out: what autograd does, on a page.

Shapes: a batch `x (M, K)`, weights `w (N, K)`, biases `b (N,)`, outputs `y (M, N)`. `d_y` is the gradient of the loss
by `y`, of y's shape. The functions compute in the dtype of their arguments: training is float32, a test takes float64.

Method: back-propagation (Rumelhart, Hinton, Williams, "Learning representations by back-propagating errors", 1986).
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch

from qsparse.data import normalize
from qsparse.models import MLP
from qsparse.train.config import TrainConfig


def linear_forward(x: np.ndarray, w: np.ndarray, b: np.ndarray) -> np.ndarray:
    """Return y = x wᵀ + b, (M, N)."""
    return x @ w.T + b


def linear_backward(x: np.ndarray, d_y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the gradients by the weights, (N, K), and by the biases, (N,): sums over the batch."""
    return d_y.T @ x, d_y.sum(axis=0)


def linear_backward_input(w: np.ndarray, d_y: np.ndarray) -> np.ndarray:
    """Return the gradient by the input, (M, K). The first layer needs none: images are not trained."""
    return d_y @ w


def relu_backward(y: np.ndarray, d_y: np.ndarray) -> np.ndarray:
    """Return the gradient by the input of y = max(0, input): d_y where y is positive, else 0."""
    return d_y * (y > 0)


def softmax_cross_entropy(logits: np.ndarray, labels: np.ndarray) -> tuple[float, np.ndarray]:
    """Return the mean cross-entropy in nats of logits (M, C) against labels (M,), and its gradient by the logits.

    The gradient of the mean is (softmax - one-hot) / M: the division by the batch size happens here, once.
    """
    rows = np.arange(len(labels))
    shifted = logits - logits.max(axis=1, keepdims=True)  # exp cannot overflow then
    exponentials = np.exp(shifted)
    sums = exponentials.sum(axis=1)
    loss = float((np.log(sums) - shifted[rows, labels]).mean())
    gradient = exponentials / sums[:, None]
    gradient[rows, labels] -= 1
    return loss, gradient / len(labels)


def sgd(
    parameter: np.ndarray,
    gradient: np.ndarray,
    momentum_buffer: np.ndarray | None,
    mask: np.ndarray | None,
    *,
    lr: float,
    momentum: float,
    weight_decay: float,
) -> None:
    """Update the parameter and its momentum buffer in place, as `torch.optim.SGD`; dead weights become exactly 0."""
    if weight_decay:
        gradient = gradient + weight_decay * parameter
    if momentum_buffer is not None:
        momentum_buffer *= momentum
        momentum_buffer += gradient
        gradient = momentum_buffer
    parameter -= lr * gradient
    if mask is not None:
        for array in (parameter, momentum_buffer):
            if array is not None:
                array[~mask] = 0


def gradients(parameters: list[np.ndarray], x: np.ndarray, labels: np.ndarray) -> tuple[float, list[np.ndarray]]:
    """Return the mean loss of a batch and its gradient by each of `parameters`: weights and biases, layer by layer."""
    weights, biases = parameters[::2], parameters[1::2]
    last = len(weights) - 1
    inputs = [x]  # of each layer; behind the last, the logits
    for number, (w, b) in enumerate(zip(weights, biases, strict=True)):
        y = linear_forward(inputs[-1], w, b)
        inputs.append(y if number == last else np.maximum(y, 0))

    loss, d_y = softmax_cross_entropy(inputs[-1], labels)
    found: list[np.ndarray] = []
    for number in range(last, -1, -1):
        found = [*linear_backward(inputs[number], d_y), *found]
        if number:
            d_y = relu_backward(inputs[number], linear_backward_input(weights[number], d_y))
    return loss, found


class NumpyBackend:
    """Steps of gradient descent in NumPy, on the model's own memory. Arguments: see `backends.make`."""

    def __init__(
        self, model: MLP, config: TrainConfig, momentum: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]
    ) -> None:
        self._config = config
        parameters = dict(model.named_parameters())
        self._parameters = [tensor.detach().numpy() for tensor in parameters.values()]
        self._momentum = [momentum[name].numpy() if name in momentum else None for name in parameters]
        self._masks = [masks[name].numpy() if name in masks else None for name in parameters]

    def step(self, images: torch.Tensor, labels: torch.Tensor, lr: float) -> float:
        """Take one step; return the mean loss before it."""
        with np.errstate(all="ignore"):  # a run that diverges is told by its loss
            loss, found = gradients(self._parameters, normalize(images).numpy(), labels.numpy())
            for arrays in zip(self._parameters, found, self._momentum, self._masks, strict=True):
                sgd(*arrays, lr=lr, momentum=self._config.momentum, weight_decay=self._config.weight_decay)
        return loss
