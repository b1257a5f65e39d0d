"""Dense model, settings and training images -> masks, and the dense model whose weights they are of.

Wanda and SparseGPT go through the layers in order, each seeing the inputs that the pruned layers before it give, as in
their papers. No pruner sees the validation or the test split; whether corrected biases stay, the validation split says.
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Mapping

import torch
from torch import Tensor
from torch.nn import functional

from qsparse import data
from qsparse.data import Dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear
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
from qsparse.train.fit import evaluate

_WHOLE_NETWORK = {"snip": snip_scores, "movement": movement_scores}
_Calibration = tuple[Tensor, Tensor]
Rounding = Callable[[Tensor], Tensor]


class BiasWarning(UserWarning):
    """Corrected biases gained nothing on the validation split, so they stayed as they were."""


def prune(
    model: MLP,
    config: SparseConfig,
    dataset: Dataset | None = None,
    *,
    rounding: Mapping[str, Rounding] | None = None,
) -> tuple[MLP, dict[str, Tensor]]:
    """Choose the weights of a dense `model` that stay: a dense copy of it and layer name -> mask (N, K) bool.

    The copy holds new weights where the pruner makes them (SparseGPT), zeros where a mask is False, and new biases
    where `config.correct_bias` asks for them and they gain.

    Args:
        model: dense, on the device of `dataset`. Left as it was.
        dataset: all pruners but magnitude and random, and the correction of biases, look at `config.samples` of its
            training images, chosen by `config.seed`. The correction is judged by the validation split. A pair of images
            and labels will do, too (see `data.as_dataset`), which has no validation split.
        rounding: of sparsegpt, layer name -> a column (N,) to its values on a grid, where weights are to lie on one.

    Warns:
        EmptyLayerWarning: for each layer that loses all its weights, naming it.
        BlockWarning: for each layer that is smaller than a block, naming it.
        BiasWarning: corrected biases that do not gain, and stay as they were.

    Raises:
        UserError: the pruner needs data and there are none; a model that is already compressed, or not finite.
        TypeError, ValueError: `config` or `dataset` is none, or its images or labels are not those of `model`.
    """
    if not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a SparseConfig, such as SparseConfig(0.1), not {type(config).__name__}")
    if dataset is not None:
        dataset = data.as_dataset(dataset)
    if config.correct_bias:
        pruned, masks = _with_better_biases(model, config, dataset, rounding)
    else:
        pruned, masks = _prune(model, config, dataset, rounding)
    if config.block is not None:
        warn_of_small({name: mask.shape for name, mask in masks.items()}, parse_block(config.block))
    warn_of_empty(masks)
    return pruned, masks


def _with_better_biases(
    model: MLP, config: SparseConfig, dataset: Dataset | None, rounding: Mapping[str, Rounding] | None
) -> tuple[MLP, dict[str, Tensor]]:
    """Prune with the biases corrected and without: of the two what is more accurate on the validation split."""
    corrected = _prune(model, config, dataset, rounding)
    if not len(dataset.validation):
        raise UserError(
            "Corrected biases are kept where they gain on the validation split, and there is none: train with "
            "--validation above 0, or give a data set that has one."
        )
    left = _prune(model, dataclasses.replace(config, correct_bias=False), dataset, rounding)
    gained, without = (evaluate(pruned, dataset.validation)[0] for pruned, _ in (corrected, left))
    if gained > without:
        return corrected
    warnings.warn(
        f"The biases stay as they were: corrected, they would give {gained:.2%} on the validation split, and so they "
        f"give {without:.2%}.",
        BiasWarning,
        stacklevel=3,
    )
    return left


def _prune(
    model: MLP, config: SparseConfig, dataset: Dataset | None, rounding: Mapping[str, Rounding] | None
) -> tuple[MLP, dict[str, Tensor]]:
    """`prune` without its warnings, and with the biases corrected wherever `config` says so."""
    weights = prunable_weights(model)
    calibration = _calibration(config, dataset, model.sizes)
    pruned = model.replace({})
    fixed = _fixed_scores(model, weights, config, calibration)
    counts = _counts(model, weights, config, calibration, fixed)
    masks = {}
    with torch.no_grad():
        inputs = _inputs(model, calibration)
        exact_inputs = inputs if config.correct_bias else None
        for (name, layer), exact_layer in zip(pruned.layers().items(), model.layers().values(), strict=True):
            inputs, exact_inputs = (None if x is None else x.to(layer.weight.dtype) for x in (inputs, exact_inputs))
            if config.pruner == "sparsegpt":
                w, masks[name] = _sparsegpt(layer.weight, inputs, config, counts.get(name), rounding and rounding[name])
                layer.weight.copy_(w)
            else:
                scores = fixed[name] if name in fixed else _scores(config.pruner, layer.weight, inputs)
                masks[name] = _mask(scores, config, counts.get(name))
                layer.weight.masked_fill_(~masks[name], 0.0)
            if exact_inputs is not None:
                if layer.bias is not None:
                    exact, now = _sums(exact_layer, exact_inputs), _sums(layer, inputs)
                    layer.bias.copy_(corrected_bias(layer.bias, exact, now))
                exact_inputs = exact_layer(exact_inputs)
            if inputs is not None:
                inputs = layer(inputs)
    return pruned, masks


def _sums(layer: Linear, inputs: Tensor) -> Tensor:
    """The outputs of `layer` before its activation."""
    return functional.linear(inputs, layer.weight, layer.bias)


def _calibration(config: SparseConfig, dataset: Dataset | None, sizes: tuple[int, ...]) -> _Calibration | None:
    """The images (M, inputs) and labels (M,) that the pruner looks at; None where it looks at none."""
    if not config.needs_data:
        return None
    if dataset is None or not len(dataset.train):
        what = "The correction of biases" if config.correct_bias else f"The pruner {config.pruner}"
        raise UserError(f"{what} looks at training images: give it a data set.")
    if (width := dataset.train.images.shape[1]) != sizes[0]:
        raise ValueError(f"the images have {width} pixels, and the model takes {sizes[0]}")
    images, labels = next(iter(data.batches(dataset.train, config.samples, seed=config.seed, epoch=0)))
    if images.is_floating_point() and not bool(images.isfinite().all()):
        raise ValueError("the images hold NaN or Inf, of which no pruner makes a score")
    if config.pruner in _WHOLE_NETWORK and not bool(((labels >= 0) & (labels < sizes[-1])).all()):
        raise ValueError(f"the labels must be from 0 to {sizes[-1] - 1}, the classes of the model")
    return images, labels


def _inputs(model: MLP, calibration: _Calibration | None) -> Tensor | None:
    return None if calibration is None else data.as_inputs(calibration[0], model.input_dtype)


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
