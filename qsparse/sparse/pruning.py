"""Dense model, settings and training images -> masks, and the dense model whose weights they are of.

Wanda and SparseGPT go through the layers in order, each seeing the inputs that the pruned layers before it give, as in
their papers. No pruner sees the validation or the test split.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from qsparse import data
from qsparse.data import Dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant.bias_correction import corrected_bias
from qsparse.sparse.blocks import block_means, largest_blocks, warn_of_small
from qsparse.sparse.config import SparseConfig, parse_block, parse_pattern
from qsparse.sparse.convert import prunable_weights
from qsparse.sparse.distribution import layer_counts
from qsparse.sparse.magnitude import magnitude_scores
from qsparse.sparse.masks import largest, largest_of_each_group, largest_of_each_row, warn_of_empty
from qsparse.sparse.movement import movement_scores
from qsparse.sparse.permutation import best_permutation, permuted_mask
from qsparse.sparse.random_scores import random_scores
from qsparse.sparse.snip import snip_scores
from qsparse.sparse.sparsegpt import sparsegpt, sparsegpt_scores
from qsparse.sparse.wanda import wanda_scores

_WHOLE_NETWORK = {"snip": snip_scores, "movement": movement_scores}
_Calibration = tuple[Tensor, Tensor]
Rounding = Callable[[Tensor], Tensor]


def prune(
    model: MLP,
    config: SparseConfig,
    dataset: Dataset | None = None,
    *,
    rounding: Mapping[str, Rounding] | None = None,
) -> tuple[MLP, dict[str, Tensor]]:
    """Choose the weights of a dense `model` that stay: a dense copy of it and layer name -> mask (N, K) bool.

    The copy holds new weights where the pruner makes them (SparseGPT), zeros where a mask is False, and new biases
    where `config.correct_bias` asks for them.

    Args:
        model: dense, on the device of `dataset`. Left as it was.
        dataset: all pruners but magnitude and random, and the correction of biases, look at `config.samples` of its
            training images, chosen by `config.seed`.
        rounding: of sparsegpt, layer name -> a column (N,) to its values on a grid, where weights are to lie on one.

    Warns:
        EmptyLayerWarning: for each layer that loses all its weights, naming it.
        BlockWarning: for each layer that is smaller than a block, naming it.

    Raises:
        UserError: the pruner needs data and there are none; a model that is already compressed, or not finite.
    """
    weights = prunable_weights(model)
    calibration = _calibration(config, dataset)
    pruned = model.replace({})
    fixed = _fixed_scores(model, weights, config, calibration)
    counts = _counts(model, weights, config, calibration, fixed)
    if config.block is not None:
        warn_of_small({name: weight.shape for name, weight in weights.items()}, parse_block(config.block))
    masks = {}
    with torch.no_grad():
        inputs = _inputs(model, calibration)
        for name, layer in pruned.layers().items():
            inputs = None if inputs is None else inputs.to(layer.weight.dtype)
            corrects = config.correct_bias and layer.bias is not None
            exact = functional.linear(inputs, layer.weight, layer.bias) if corrects else None
            if config.pruner == "sparsegpt":
                w, masks[name] = _sparsegpt(layer.weight, inputs, config, counts.get(name), rounding and rounding[name])
                layer.weight.copy_(w)
            else:
                scores = fixed[name] if name in fixed else _scores(config.pruner, layer.weight, inputs)
                masks[name] = _mask(scores, config, counts.get(name))
                layer.weight.masked_fill_(~masks[name], 0.0)
            if corrects:
                pruned_outputs = functional.linear(inputs, layer.weight, layer.bias)
                layer.bias.copy_(corrected_bias(layer.bias, exact, pruned_outputs))
            if inputs is not None:
                inputs = layer(inputs)
    warn_of_empty(masks)
    return pruned, masks


def _calibration(config: SparseConfig, dataset: Dataset | None) -> _Calibration | None:
    """The images (M, 784) uint8 and labels (M,) that the pruner looks at; None where it looks at none."""
    if not config.needs_data:
        return None
    if dataset is None or not len(dataset.train):
        what = "The correction of biases" if config.correct_bias else f"The pruner {config.pruner}"
        raise UserError(f"{what} looks at training images: give it a data set.")
    return next(iter(data.batches(dataset.train, config.samples, seed=config.seed, epoch=0)))


def _inputs(model: MLP, calibration: _Calibration | None) -> Tensor | None:
    return None if calibration is None else data.normalize(calibration[0], model.input_dtype)


def _counts(
    model: MLP,
    weights: dict[str, Tensor],
    config: SparseConfig,
    calibration: _Calibration | None,
    fixed: dict[str, Tensor],
) -> dict[str, int]:
    """Layer name -> number of weights that it keeps; empty where a pattern says so. `global` ranks the dense model."""
    if config.pattern is not None:
        return {}
    scores = dict(fixed)
    if config.distribution != "global":
        scores = weights
    elif not fixed:
        inputs = _inputs(model, calibration)
        with torch.no_grad():
            for name, layer in model.layers().items():
                scores[name] = _scores(config.pruner, layer.weight, inputs)
                if inputs is not None:
                    inputs = layer(inputs.to(layer.weight.dtype))
    if config.block is not None:
        scores = {name: block_means(score, parse_block(config.block)) for name, score in scores.items()}
    return layer_counts(scores, config.density, config.distribution, config.min_density)


def _fixed_scores(
    model: MLP, weights: dict[str, Tensor], config: SparseConfig, calibration: _Calibration | None
) -> dict[str, Tensor]:
    """The scores of pruners for which they do not depend on how the layers before were pruned; else none."""
    if config.pruner == "random":
        return random_scores(weights, config.seed)
    if calibration is not None and config.pruner in _WHOLE_NETWORK:
        return _WHOLE_NETWORK[config.pruner](model, *calibration)
    return {}


def _scores(pruner: str, w: Tensor, inputs: Tensor | None) -> Tensor:
    if pruner == "magnitude":
        return magnitude_scores(w)
    return wanda_scores(w, inputs) if pruner == "wanda" else sparsegpt_scores(w, inputs)


def _mask(scores: Tensor, config: SparseConfig, count: int | None) -> Tensor:
    if config.pattern is not None:
        n, m = parse_pattern(config.pattern)
        if config.permute:
            return permuted_mask(scores, n, m, best_permutation(scores, n, m, seed=config.seed))
        return largest_of_each_group(scores, n, m)
    if config.block is not None:
        return largest_blocks(scores, count, parse_block(config.block))
    return largest_of_each_row(scores, count) if config.pruner == "wanda" else largest(scores, count)


def _sparsegpt(
    w: Tensor, inputs: Tensor, config: SparseConfig, count: int | None, round: Rounding | None
) -> tuple[Tensor, Tensor]:
    if config.pattern is not None:
        return sparsegpt(w, inputs, pattern=parse_pattern(config.pattern), round=round)
    return sparsegpt(w, inputs, count, round=round)
