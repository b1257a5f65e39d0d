"""Dynamic sparse training: the network is sparse from its first step on, and its connections move while it trains.

RigL: Evci et al., "Rigging the Lottery: Making All Tickets Winners", 2020. SET: Mocanu et al., "Scalable Training of
Artificial Neural Networks with Adaptive Sparse Connectivity Inspired by Network Science", 2018. Symbols:

    t      in [0, 1], how much of the epochs in which connections move is done
    f(t)   = alpha / 2 * (1 + cos(pi * t / T_end)), alpha = 0.3, T_end = 0.75: the fraction of its connections that a
           layer changes at time t, and none from T_end on (SET's paper has a constant 0.3; here both share RigL's)
    drop   the connections of the least |W|
    grow   as many, of those that are not there: of the largest |dL/dW| (rigl), or any (set); they begin at 0

Connections move at every look at the losses (50 steps; the paper: 100). Each layer keeps as many as it began with, so
the density is exact throughout.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from qsparse import data, nn
from qsparse.data import Dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse.config import DYNAMIC, SparseConfig, choose
from qsparse.sparse.masks import largest
from qsparse.sparse.pruning import prune
from qsparse.train.config import TrainConfig
from qsparse.train.fit import EpochEnd, Progress, fit
from qsparse.train.torch_backend import TorchBackend

_ALPHA, _T_END = 0.3, 0.75


def fraction_at(t: float) -> float:
    """f(t) for t in [0, 1]."""
    return _ALPHA / 2 * (1 + math.cos(math.pi * t / _T_END)) if t < _T_END else 0.0


def move(w: Tensor, mask: Tensor, growth: Tensor, count: int) -> tuple[Tensor, Tensor]:
    """Drop the `count` least connections of `w` (N, K) and grow those of the largest `growth` (N, K).

    mask: (N, K) bool, the connections now; count: from 0 to their number. Returns the new mask, of as many, and which
    of the old ones stayed; the others begin at 0. One that was dropped may grow again.
    """
    alive = int(mask.sum())
    stayed = largest(w.abs().masked_fill(~mask, -1.0), alive - count)
    return stayed | largest(growth.masked_fill(stayed, -1.0), count), stayed


def train_dynamically(
    model: MLP,
    config: SparseConfig,
    dataset: Dataset,
    train: TrainConfig,
    moving_epochs: int,
    method: str,
    *,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, Tensor]:
    """Train a dense, untrained `model` in place with `config.density` of its connections; return the last masks.

    config: its pruner (random, for the methods of the papers) chooses where the training begins, its samples are the
    images that rigl's gradients are of. train: how; its epochs are all of the training. moving_epochs: the first of
    them, in which connections move. method: "rigl" or "set".

    Raises UserError for an unknown method, a pattern or blocks, and as `fit`; ValueError for moving_epochs outside
    1..train.epochs.
    """
    check_dynamic(config, method)
    if not 1 <= moving_epochs <= train.epochs:
        raise ValueError(f"moving_epochs must be from 1 to {train.epochs}, not {moving_epochs}")
    masks = prune(model, config, dataset)[1]
    generator, looks = torch.Generator().manual_seed(config.seed), 0

    def look(now: Progress) -> None:
        nonlocal looks
        looks += 1
        fraction = fraction_at((now.epoch - 1 + now.step / now.steps) / moving_epochs)
        if fraction:
            for name, growth in _growth(model, dataset, config, method, generator, looks).items():
                weight, mask = model.layers()[name].weight.detach(), masks[name]
                moved, stayed = move(weight, mask, growth, round(fraction * int(mask.sum())))
                mask.copy_(moved)  # in place: the training reads these very masks at its next step
                weight.masked_fill_(~stayed, 0.0)
        if progress is not None:
            progress(now)

    fit(model, dataset, train, masks=masks, on_epoch=on_epoch, progress=look, make=TorchBackend)
    return masks


def check_dynamic(config: SparseConfig, method: str) -> None:
    """Raise UserError unless `config` can be trained by `method`."""
    choose("method", method, DYNAMIC)
    if config.pattern is not None or config.block is not None:
        raise UserError(f"{method} moves single connections anywhere in a layer: give a density, no pattern, no block.")


def _growth(
    model: MLP, dataset: Dataset, config: SparseConfig, method: str, generator: torch.Generator, look: int
) -> dict[str, Tensor]:
    """Layer name -> (N, K) float, at least 0: larger for a connection that is rather to grow."""
    weights = {name: layer.weight for name, layer in model.layers().items()}
    if method == "set":
        return {name: torch.rand(w.shape, generator=generator).to(w.device) for name, w in weights.items()}
    images, labels = next(iter(data.batches(dataset.train, config.samples, seed=config.seed, epoch=look)))
    with torch.enable_grad():
        gradients = torch.autograd.grad(nn.cross_entropy(model(images), labels), list(weights.values()))
    return {name: gradient.abs() for name, gradient in zip(weights, gradients, strict=True)}
