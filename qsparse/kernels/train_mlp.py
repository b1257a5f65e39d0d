"""Many steps of stochastic gradient descent on a multilayer perceptron, in place."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch

from qsparse.kernels import (
    _train_mlp_grid_sm90,
    _train_mlp_host,
    _train_mlp_sm80,
    _train_mlp_sm90,
    _train_mlp_two_sm90,
)
from qsparse.kernels._face import (
    check_choice,
    check_count,
    check_number,
    check_same_device,
    check_tensor,
    face,
    kind_of,
    pick_tier,
)
from qsparse.kernels.bias_relu_grad import bias_relu_grad
from qsparse.kernels.gemm import gemm
from qsparse.kernels.sgd import sgd
from qsparse.kernels.softmax_cross_entropy import softmax_cross_entropy

_HOPPER = (_train_mlp_sm90, _train_mlp_two_sm90, _train_mlp_grid_sm90)  # the first that takes a network is the fastest
SOURCES = {each.SOURCE: each.INSTANCES for each in (_train_mlp_sm80, *_HOPPER)}


@face(SOURCES, in_place=("parameters", "velocities"))
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
    precision="highest",
    tier=None,
):
    """Train on batch after batch, the parameters and velocities updated in place.

    Parameters
    ----------
    images : (any, sizes[0]) uint8
        A pixel ``p`` enters the network as ``p * scale + shift``.
    labels : (any,) int64
    order : (rows,) int64
        The image of each row; the rows are the batches one after the other, the last one perhaps smaller. An image
        that is not there is undefined behaviour (checking would cost a device synchronisation).
    rates : (ceil(rows / batch),) float32
        The learning rate of each step.
    parameters : (P,) float32, contiguous
        Weights (N, K) and biases (N,) by turns, layer after layer, one behind the other.
    velocities : (P,) float32, contiguous, optional
        Their momentum buffers. Needed when ``momentum`` is not 0.
    mask : (P,) bool, optional
        Where it is False, parameter and velocity become exactly zero in the first step, and stay so.
    sizes : tuple of int
        Widths from input to output: ``(784, 256, 10)``. Every layer but the last is followed by a ReLU.
    batch : int
        Images a step, at least 1.
    scale, shift, momentum, weight_decay : float
    precision : str
        "highest": as near as products of float32. "high": operands rounded to float16, which has the 11 bits of tf32.
        "bfloat16": to 8 bits. Parameters stay float32, sums too, and gradients are scaled by 1,024 until they are
        summed. Only the kernels on tensor cores round; but for bfloat16, weights must stay below 256 there and hidden
        outputs below 65,504, or they become infinite.
    tier : str, optional
        "sm90", "sm80" or "simt": take no other, for tests and measurements.

    Returns
    -------
    (rows,) float32: the loss of each row's image in nats, before its step

    All steps are one launch, with at most 16 classes. ``sm90`` takes networks ``(784, H, C)``, H <= 256, with ``batch``
    <= 64 by one cluster; ``(784, H, G, C)``, H <= 512 and G <= 160, too, in precision "high" and without momentum; and
    others by the whole grid, with ``batch`` <= 1024, where its shared memory holds the weights: 128 tiles of 128 x 128.
    It takes no mask.
    ``sm80`` takes everything else by the whole grid. More classes are a launch a product, by this package's other
    kernels.

    Raises TypeError for another dtype; ValueError for shapes that do not fit, or a ``tier`` that cannot be had.

    Source: the update of ``torch.optim.SGD`` (dampening 0, no Nesterov); the gradient is that of the mean
    cross-entropy of a batch.
    """
    check_tensor("images", images, (torch.uint8,), (None, None))
    if not isinstance(sizes, list | tuple) or not all(isinstance(size, int | np.integer) for size in sizes):
        raise TypeError(f"sizes must be a tuple of integers, got {kind_of(sizes)} {sizes!r}")
    sizes = tuple(map(int, sizes))
    if len(sizes) < 2 or min(sizes) < 1 or sizes[0] != images.shape[1]:
        raise ValueError(f"sizes must be two widths or more, the first one that of images ({images.shape[1]}): {sizes}")
    batch = check_count("batch", batch)
    scale, shift = check_number("scale", scale), check_number("shift", shift)
    momentum, weight_decay = check_number("momentum", momentum), check_number("weight_decay", weight_decay)
    check_choice("precision", precision, _train_mlp_host.PARTS)
    check_tensor("labels", labels, (torch.int64,), (len(images),))
    check_tensor("order", order, (torch.int64,), (None,))
    check_tensor("rates", rates, (torch.float32,), (math.ceil(len(order) / batch),))
    count = sum(n * (k + 1) for k, n in itertools.pairwise(sizes))
    check_tensor("parameters", parameters, (torch.float32,), (count,))
    if velocities is not None:
        check_tensor("velocities", velocities, (torch.float32,), (count,))
    elif momentum:
        raise ValueError(f"momentum is {momentum}, so velocities are needed")
    if mask is not None:
        check_tensor("mask", mask, (torch.bool,), (count,))
    others = {"labels": labels, "order": order, "rates": rates}
    check_same_device(images, **others, parameters=parameters, velocities=velocities, mask=mask)
    for name, value in (("parameters", parameters), ("velocities", velocities)):
        if value is not None and not value.is_contiguous():
            raise ValueError(f"{name} is changed in place and must be contiguous")

    images, labels, order, rates = (value.contiguous() for value in (images, labels, order, rates))
    mask = None if mask is None else mask.contiguous()
    losses = torch.empty(len(order), dtype=torch.float32, device=images.device)
    possible = ["simt"]
    best = train_mlp.tier(images.device)
    if best in ("sm80", "sm90") and _train_mlp_sm80.supports(parameters, sizes):
        possible.insert(0, "sm80")
    hopper = None
    if best == "sm90":
        given = images, parameters, velocities, mask, sizes, batch, precision
        device = images.device.index, precision, velocities is not None
        hopper = next((each for each in _HOPPER if each.supports(*given) and each.fits(*device)), None)
    if hopper:
        possible.insert(0, "sm90")
    chosen = pick_tier(tier, possible, images.device)
    if len(order):
        launch = {"sm90": hopper and hopper.launch, "sm80": _train_mlp_sm80.launch}.get(chosen, _by_layers)
        options = {"momentum": momentum, "weight_decay": weight_decay}
        arrays = images, labels, order, rates, parameters, velocities, mask, losses
        launch(*arrays, sizes, batch, scale, shift, options, precision)
    return losses


def _layers(flat: torch.Tensor, sizes: tuple[int, ...]) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the weights (N, K) and biases (N,) of each layer in ``parameters``."""
    found, at = [], 0
    for k, n in itertools.pairwise(sizes):
        found.append((flat[at : at + n * k].view(n, k), flat[at + n * k : at + n * (k + 1)]))
        at += n * (k + 1)
    return found


@torch.no_grad()
def _by_layers(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    """Step by step, by the other faces."""
    layers = _layers(parameters, sizes)
    for step, rows in enumerate(order.split(batch)):
        inputs = [images[rows].to(torch.float32).mul_(scale).add_(shift)]  # of each layer; behind the last, the logits
        for w, b in layers:
            inputs.append(gemm(inputs[-1], w, b, relu=len(inputs) < len(layers)))
        losses[step * batch : step * batch + len(rows)], dy = softmax_cross_entropy(inputs[-1], labels[rows])
        gradient = torch.empty_like(parameters)
        for i, (dw, db) in reversed(list(enumerate(_layers(gradient, sizes)))):
            dz, db[:] = bias_relu_grad(dy, inputs[i + 1] if i + 1 < len(layers) else None)
            gemm(dz.t(), inputs[i].t(), out=dw)
            if i:
                dy = gemm(dz, layers[i][0].t())
        sgd(parameters, gradient, velocities, lr=rates[step], mask=mask, **options)
