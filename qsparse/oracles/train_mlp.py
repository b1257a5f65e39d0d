"""Many steps of stochastic gradient descent on a multilayer perceptron."""

import itertools

import numpy as np

from qsparse.oracles.softmax_cross_entropy import softmax_cross_entropy


def train_mlp(
    images,
    labels,
    order,
    rates,
    parameters,
    velocities=None,
    mask=None,
    *,
    sizes,
    batch,
    scale=1 / 255,
    shift=0.0,
    momentum=0.0,
    weight_decay=0.0,
):
    """``(losses, new parameters, new velocities)`` in float64."""
    parameters = np.array(parameters, np.float64)
    velocities = np.zeros_like(parameters) if velocities is None else np.array(velocities, np.float64)
    alive = np.ones(len(parameters), bool) if mask is None else np.asarray(mask)
    losses = []
    for step, start in enumerate(range(0, len(order), batch)):
        rows = np.asarray(order)[start : start + batch]
        weights, biases, at = [], [], 0
        for k, n in itertools.pairwise(sizes):
            weights.append(parameters[at : at + n * k].reshape(n, k))
            biases.append(parameters[at + n * k : at + n * (k + 1)])
            at += n * (k + 1)

        inputs = [np.asarray(images, np.float64)[rows] * scale + shift]
        for w, b in zip(weights, biases, strict=True):
            y = inputs[-1] @ w.T + b
            inputs.append(np.maximum(y, 0) if len(inputs) < len(weights) else y)
        loss, dz = softmax_cross_entropy(inputs[-1], np.asarray(labels)[rows])
        losses.append(loss)

        gradient = []
        for i in reversed(range(len(weights))):
            gradient = [(dz.T @ inputs[i]).ravel(), dz.sum(axis=0), *gradient]
            dz = (dz @ weights[i]) * (inputs[i] > 0)
        velocities = np.where(alive, momentum * velocities + np.concatenate(gradient) + weight_decay * parameters, 0)
        parameters = np.where(alive, parameters - rates[step] * velocities, 0)
    return np.concatenate([np.empty(0), *losses]), parameters, velocities
