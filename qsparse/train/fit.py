"""The training loop: one for every backend (see backends.py), on a CPU and on a GPU.

Method: stochastic gradient descent with momentum and weight decay as in `torch.optim.SGD` (Sutskever et al., "On the
importance of initialization and momentum in deep learning", 2013, with the learning rate outside the momentum), the
learning rate decaying linearly to zero over all steps.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from qsparse import data
from qsparse.data import Dataset, Split
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.train import backends
from qsparse.train.config import TrainConfig

# Steps between two looks at the losses. A look waits for the GPU, so it does not happen every step.
STEPS_PER_LOOK = 50
EVALUATION_ROWS = 10_000

Momentum = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Progress:
    """Where a run is: `step` of `steps` of the running `epoch` (counted from 1), the latest mean loss, the speed."""

    epoch: int
    step: int
    steps: int
    loss: float
    images_per_second: float


@dataclass(frozen=True)
class EpochEnd:
    """What stands at the end of epoch number `epoch` (counted from 1).

    model and momentum (a buffer for each parameter, by name; empty when momentum is 0) are the live ones: copy them
    to keep them. metrics: one JSON-able dict for each finished epoch, the newest last.
    """

    epoch: int
    model: MLP
    momentum: Momentum
    metrics: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True)
class FitState:
    """What a resumed run goes on from, besides the model's weights: see `EpochEnd`."""

    momentum: Momentum = field(default_factory=dict)
    metrics: list[dict[str, Any]] = field(default_factory=list)


def fit(
    model: MLP,
    dataset: Dataset,
    config: TrainConfig,
    *,
    masks: Mapping[str, torch.Tensor] | None = None,
    start_epoch: int = 0,
    state: FitState | None = None,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
    make: Callable[..., backends.Backend] = backends.make,
) -> list[dict[str, Any]]:
    """Train `model` in place on `dataset.train` and return one dict of metrics for each epoch.

    model: float32 parameters, on the device of `dataset`; the loop runs there, whatever `config.device` says. What
    takes the steps there is `config.backend`.
    masks: layer name -> bool (N, K), True where a weight lives. A dead weight is exactly zero from before the first
    step on, whatever the momentum and the weight decay; a layer without a mask is trained whole.
    start_epoch: number of epochs already done (0 for a new run); with `state`, and with the weights that stood then,
    the rest of the run is bit for bit what it would have been without the interruption.
    on_epoch: called at the end of each epoch. progress: called every `STEPS_PER_LOOK` steps and at each epoch's end.
    make: makes the backend, with the arguments of `backends.make`.

    Metrics: epoch (from 1), loss (mean over the training images, as they were met), validation_accuracy (fraction;
    None without a validation split), test_accuracy (fraction), seconds and images_per_second of the training alone.
    Processes that train together add processes, all_reduce_bytes and all_reduce_s of the epoch (see parallel.py).

    Raises UserError, naming the step or the layer, when the loss or a weight becomes NaN or infinite, and when the
    backend cannot run here; ValueError for an empty training or test split, a mask for a layer that is not there, or a
    mask of another shape.
    """
    state = state or FitState()
    metrics = list(state.metrics)
    if len(dataset.train) == 0 or len(dataset.test) == 0:
        raise ValueError(f"dataset {dataset.name}: training and test split must hold at least one image each")
    parameters = dict(model.named_parameters())
    parameter_masks = _by_parameter(masks or {}, parameters)
    momentum = {}
    if config.momentum:
        momentum = {name: state.momentum.get(name, torch.zeros_like(p)) for name, p in parameters.items()}
    with torch.no_grad():
        for name, mask in parameter_masks.items():
            parameters[name].masked_fill_(~mask, 0.0)
    backend = make(model, config, momentum, parameter_masks)

    for epoch in range(start_epoch, config.epochs):
        with backends.threads_for(config.backend):
            trained = _epoch(backend, model, dataset.train, config, epoch, progress)
        metrics.append(
            {
                **trained,
                "validation_accuracy": evaluate(model, dataset.validation)[0] if len(dataset.validation) else None,
                "test_accuracy": evaluate(model, dataset.test)[0],
            }
        )
        if on_epoch is not None:
            on_epoch(EpochEnd(epoch + 1, model, momentum, list(metrics)))
    return metrics


def evaluate(model: MLP, split: Split) -> tuple[float, torch.Tensor]:
    """Classify every image of `split`, in chunks of 10,000 rows.

    Returns the accuracy (a fraction) and the predicted classes, int64 (M,), on the split's device.
    Raises ValueError when the split is empty.
    """
    if len(split) == 0:
        raise ValueError("an empty split has no accuracy")
    with torch.no_grad():
        predictions = torch.cat([model(chunk).argmax(dim=1) for chunk in split.images.split(EVALUATION_ROWS)])
    return (predictions == split.labels).sum().item() / len(split), predictions


def _epoch(
    backend: backends.Backend,
    model: MLP,
    train: Split,
    config: TrainConfig,
    epoch: int,
    progress: Callable[[Progress], None] | None,
) -> dict[str, Any]:
    """Train one epoch (`epoch` counts from 0) and return its metrics."""
    steps = math.ceil(len(train) / config.batch_size)
    all_steps = steps * config.epochs
    rates = [config.lr * (1 - step / all_steps) for step in range(epoch * steps, (epoch + 1) * steps)]
    started = time.perf_counter()
    total_loss, step = 0.0, 0

    for latest in _looks(backend, train, config, epoch, rates):
        _refuse_bad_loss(latest, first_step=epoch * steps + step + 1, all_steps=all_steps, lr=config.lr)
        step += len(latest)
        images_seen = min(step * config.batch_size, len(train))
        # Only the last batch of an epoch can be smaller than batch_size, and it is the last of its look.
        last = images_seen - (step - 1) * config.batch_size
        total_loss += sum(latest[:-1]) * config.batch_size + latest[-1] * last
        if progress is not None:
            speed = images_seen / (time.perf_counter() - started)
            progress(Progress(epoch + 1, step, steps, sum(latest) / len(latest), speed))

    seconds = time.perf_counter() - started
    for name, parameter in model.named_parameters():
        if not torch.isfinite(parameter).all():
            raise UserError(
                f"training diverged: layer {name.rpartition('.')[0]} holds NaN or infinite values after epoch "
                f"{epoch + 1}; try a smaller --lr than {config.lr}"
            )
    return {
        "epoch": epoch + 1,
        "loss": total_loss / len(train),
        "seconds": seconds,
        "images_per_second": len(train) / seconds,
        **backends.metrics_of(backend),
    }


def _looks(
    backend: backends.Backend, train: Split, config: TrainConfig, epoch: int, rates: list[float]
) -> Iterator[list[float]]:
    """Take the steps of an epoch, and yield the losses of `STEPS_PER_LOOK` of them at a time."""
    if isinstance(backend, backends.EpochBackend):  # the GPU is left alone until the epoch is over
        for latest in backend.epoch(train, epoch, rates).split(STEPS_PER_LOOK):
            yield latest.tolist()
        return
    losses, looked = torch.empty(len(rates), device=train.images.device), 0
    batches = data.batches(train, config.batch_size, seed=config.seed, epoch=epoch)
    for step, ((images, labels), rate) in enumerate(zip(batches, rates, strict=True), start=1):
        losses[step - 1] = backend.step(images, labels, rate)
        if step % STEPS_PER_LOOK == 0 or step == len(rates):
            yield losses[looked:step].tolist()
            looked = step


def _refuse_bad_loss(losses: list[float], *, first_step: int, all_steps: int, lr: float) -> None:
    """Raise UserError when one of `losses`, those of the steps from `first_step` on, is NaN or infinite."""
    for step, loss in enumerate(losses, start=first_step):
        if not math.isfinite(loss):
            raise UserError(
                f"training diverged: the loss is {loss} at step {step} of {all_steps}; try a smaller --lr than {lr}"
            )


def _by_parameter(
    masks: Mapping[str, torch.Tensor], parameters: dict[str, torch.nn.Parameter]
) -> dict[str, torch.Tensor]:
    """Check `masks`, and key them by the name of the weight that each is for, on that weight's device."""
    by_parameter = {}
    for layer, mask in masks.items():
        weight = parameters.get(f"{layer}.weight")
        if weight is None:
            raise ValueError(f"masks: there is no layer {layer!r} with a weight in the model")
        if mask.shape != weight.shape or mask.dtype != torch.bool:
            raise ValueError(
                f"masks[{layer!r}] is {mask.dtype} {tuple(mask.shape)}: it must be bool {tuple(weight.shape)}"
            )
        by_parameter[f"{layer}.weight"] = mask.to(weight.device)
    return by_parameter
