"""Many steps of stochastic gradient descent on a multilayer perceptron, in place."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator

import torch

from qsparse.kernels._face import check_same_device, check_tensor, face
from qsparse.kernels._load import prepare
from qsparse.kernels.bias_relu_grad import bias_relu_grad
from qsparse.kernels.gemm import gemm
from qsparse.kernels.sgd import sgd
from qsparse.kernels.softmax_cross_entropy import softmax_cross_entropy

SOURCE = "train_mlp_sm90.cu"
INPUTS, HIDDEN, CLASSES, BATCH = 784, 256, 16, 64  # the largest that the kernel takes; INPUTS exactly
BLOCKS, THREADS, SHARED = 16, 256, 200 * 1024
_PARTS = {"highest": 2, "high": 1}


def _instance(precision: str, momentum: bool) -> str:
    return f"train_mlp_sm90<{_PARTS[precision]}, {str(momentum).lower()}>"


SOURCES = {SOURCE: tuple(_instance(precision, momentum) for precision in _PARTS for momentum in (False, True))}


@face(SOURCES, in_place=("parameters", "velocities"))
def train_mlp(
    images,
    labels,
    order,
    rates,
    parameters,
    velocities=None,
    *,
    sizes,
    batch,
    scale=1 / 255,
    shift=0.0,
    momentum=0.0,
    weight_decay=0.0,
    precision="highest",
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
    sizes : tuple of int
        Widths from input to output: ``(784, 256, 10)``. Every layer but the last is followed by a ReLU.
    batch : int
        Images a step, at least 1.
    scale, shift, momentum, weight_decay : float
    precision : str
        "highest": sums of products of float32. "high": operands rounded to 11 bits, as in tf32. Only the ``sm90``
        kernel rounds, and there weights and outputs of the hidden layer must stay below 256 and 65,504.

    Returns
    -------
    (rows,) float32: the loss of each row's image in nats, before its step

    A Hopper card takes all steps in one launch where sizes are ``(784, H, C)`` with H <= 256 and C <= 16, and
    ``batch`` is at most 64: see ``fits``. Everything else is a launch a product, by this package's other kernels.

    Raises TypeError for another dtype; ValueError for shapes that do not fit.

    Source: the update of ``torch.optim.SGD`` (dampening 0, no Nesterov); the gradient is that of the mean
    cross-entropy of a batch.
    """
    check_tensor("images", images, (torch.uint8,), (None, None))
    sizes = tuple(sizes)
    if len(sizes) < 2 or min(sizes) < 1 or sizes[0] != images.shape[1]:
        raise ValueError(f"sizes must be two widths or more, the first one that of images ({images.shape[1]}): {sizes}")
    if batch < 1:
        raise ValueError(f"batch must be at least 1, got {batch}")
    if precision not in _PARTS:
        raise ValueError(f"precision must be one of {', '.join(_PARTS)}, got {precision!r}")
    check_tensor("labels", labels, (torch.int64,), (len(images),))
    check_tensor("order", order, (torch.int64,), (None,))
    check_tensor("rates", rates, (torch.float32,), (math.ceil(len(order) / batch),))
    count = sum(n * (k + 1) for k, n in itertools.pairwise(sizes))
    check_tensor("parameters", parameters, (torch.float32,), (count,))
    if velocities is not None:
        check_tensor("velocities", velocities, (torch.float32,), (count,))
    elif momentum:
        raise ValueError(f"momentum is {momentum}, so velocities are needed")
    check_same_device(images, labels=labels, order=order, rates=rates, parameters=parameters, velocities=velocities)
    for name, value in (("parameters", parameters), ("velocities", velocities)):
        if value is not None and not value.is_contiguous():
            raise ValueError(f"{name} is changed in place and must be contiguous")
    options = {"momentum": momentum, "weight_decay": weight_decay}
    losses = torch.empty(len(order), dtype=torch.float32, device=images.device)
    images, labels, order, rates = (value.contiguous() for value in (images, labels, order, rates))
    aligned = all(value is None or value.data_ptr() % 16 == 0 for value in (images, parameters, velocities))
    if not (aligned and fits(sizes, batch, images.device)):
        _by_layers(images, labels, order, rates, parameters, velocities, losses, sizes, batch, scale, shift, options)
    elif len(order):
        offsets = _offsets(sizes)
        pointers = [parameters.data_ptr() + 4 * at for at in offsets]
        pointers += [0 if velocities is None else velocities.data_ptr() + 4 * at for at in offsets]
        centre = min(max(round(-shift / scale), 0), 255) if scale else 0
        prepare(
            images.device.index,
            SOURCE,
            _instance(precision, velocities is not None),
            "PPPPPPPPPPPPPiiiiffiff",
            BLOCKS,
            THREADS,
            SHARED,
            cluster=BLOCKS,
        )(
            (
                *(value.data_ptr() for value in (images, labels, order, rates)),
                *pointers,
                losses.data_ptr(),
                *(len(order), batch, sizes[1], sizes[2], scale, shift, centre, momentum, weight_decay),
            )
        )
    return losses


def fits(sizes: tuple[int, ...], batch: int, device: torch.device) -> bool:
    """Whether one launch takes all steps."""
    small = len(sizes) == 3 and sizes[0] == INPUTS and sizes[1] <= HIDDEN and sizes[2] <= CLASSES and batch <= BATCH
    return small and train_mlp.tier(device) == "sm90"


def _offsets(sizes: tuple[int, ...]) -> list[int]:
    """Where each layer's weights and biases begin."""
    found, at = [], 0
    for k, n in itertools.pairwise(sizes):
        found += [at, at + n * k]
        at += n * (k + 1)
    return found


def layers(flat: torch.Tensor, sizes: tuple[int, ...]) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Views of the weights (N, K) and biases (N,) of each layer in ``parameters``."""
    offsets = _offsets(sizes)
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        w, b = offsets[2 * i], offsets[2 * i + 1]
        yield flat[w:b].view(n, k), flat[b : b + n]


@torch.no_grad()
def _by_layers(images, labels, order, rates, parameters, velocities, losses, sizes, batch, scale, shift, options):
    """Step by step, by the other faces."""
    weights, biases = zip(*layers(parameters, sizes), strict=True)
    for step, rows in enumerate(order.split(batch)):
        if not len(rows):
            continue
        activations = [images[rows].to(torch.float32).mul_(scale).add_(shift)]
        for w, b in zip(weights, biases, strict=True):
            activations.append(gemm(activations[-1], w, b, relu=len(activations) < len(weights)))
        losses[step * batch : step * batch + len(rows)], dy = softmax_cross_entropy(activations[-1], labels[rows])
        gradient = torch.empty_like(parameters)
        for i, (dw, db) in reversed(list(enumerate(layers(gradient, sizes)))):
            dz, db[:] = bias_relu_grad(dy, activations[i + 1] if i + 1 < len(weights) else None)
            gemm(dz.t(), activations[i].t(), out=dw)
            if i:
                dy = gemm(dz, weights[i].t())
        sgd(parameters, gradient, velocities, lr=rates[step], **options)
