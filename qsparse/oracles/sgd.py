"""One step of stochastic gradient descent."""

import numpy as np


def sgd(param, grad, momentum_buffer=None, *, lr, momentum=0.0, weight_decay=0.0, mask=None):
    """``(new param, new momentum buffer)`` in float64."""
    param = np.asarray(param, np.float64)
    velocity = np.zeros_like(param) if momentum_buffer is None else np.asarray(momentum_buffer, np.float64)
    velocity = momentum * velocity + np.asarray(grad, np.float64) + weight_decay * param
    param = param - lr * velocity
    if mask is not None:
        param, velocity = np.where(mask, param, 0), np.where(mask, velocity, 0)
    return param, velocity
