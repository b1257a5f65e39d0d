"""Gradual pruning: the density falls while the network trains, fast at first and ever slower.

Zhu & Gupta, "To Prune, or Not to Prune: Exploring the Efficacy of Pruning for Model Compression", 2018. Symbols:

    d    the density asked for
    t    in [0, 1], how much of the pruning epochs is done
    d_t = d + (1 - d) * (1 - t)^3

The paper's sparsity is 1 - d_t, from 0 on. Every few steps the masks are chosen anew for d_t, by the scores that the
weights then have; what was pruned is zero by then, so it comes back only where a score is no better than that of zero.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import torch

from qsparse.data import Dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse.config import SparseConfig
from qsparse.sparse.pruning import prune
from qsparse.train.config import TrainConfig
from qsparse.train.fit import EpochEnd, Progress, fit
from qsparse.train.torch_backend import TorchBackend


def density_at(density: float, t: float) -> float:
    """d_t for t in [0, 1], later d."""
    return density + (1 - density) * (1 - min(t, 1.0)) ** 3


def check_gradual(config: SparseConfig) -> None:
    """Raise UserError unless `config` can be reached gradually."""
    if config.pattern is not None:
        raise UserError(
            f"A gradual schedule needs a density to fall to; the pattern {config.pattern} has none on the way."
        )
    if config.pruner == "sparsegpt":
        raise UserError("sparsegpt makes new weights at one stroke: choose another pruner for a gradual schedule.")


def prune_gradually(
    model: MLP,
    config: SparseConfig,
    dataset: Dataset,
    train: TrainConfig,
    pruning_epochs: int,
    *,
    on_epoch: Callable[[EpochEnd], None] | None = None,
    progress: Callable[[Progress], None] | None = None,
) -> dict[str, torch.Tensor]:
    """Train a dense `model` in place while its density falls to `config.density`; return the last masks, which hold.

    train: how; its epochs are all of the training, the learning rate decaying over them. pruning_epochs: the first of
    them, in which the density falls; in the others the masks stand still.

    Raises UserError for a pattern, for sparsegpt, and as `fit`; ValueError for pruning_epochs outside 1..train.epochs.
    """
    check_gradual(config)
    if not 1 <= pruning_epochs <= train.epochs:
        raise ValueError(f"pruning_epochs must be from 1 to {train.epochs}, not {pruning_epochs}")
    masks = {name: torch.ones_like(layer.weight, dtype=torch.bool) for name, layer in model.layers().items()}
    done = False

    def tighten(now: Progress) -> None:
        nonlocal done
        if not done:
            t = (now.epoch - 1 + now.step / now.steps) / pruning_epochs
            chosen = dataclasses.replace(config, density=density_at(config.density, t))
            for name, mask in prune(model, chosen, dataset)[1].items():
                masks[name].copy_(mask)  # in place: the training reads these very masks at its next step
            done = t >= 1
        if progress is not None:
            progress(now)

    # Step by step on a GPU too: a backend that takes an epoch at once would read the masks before it alone.
    fit(model, dataset, train, masks=masks, on_epoch=on_epoch, progress=tighten, make=TorchBackend)
    with torch.no_grad():
        for name, layer in model.layers().items():
            layer.weight.masked_fill_(~masks[name], 0.0)
    return masks
