"""Both at once: weights that are pruned and rounded to int8, stored in CSR or in 2:4.

Symbols: W (N, K) the weights of a layer, m its mask, s (N,) one scale an output channel, Q = rint(W / s) int8.

    prune-first  a pruner chooses m, and fine-tuning may follow; then s = max |W| of what stays of a row / 127
    joint        SparseGPT and the rounding in one pass: the columns to the right make up for what pruning and rounding
                 lose of a column. s is that of a pass that only prunes, by which what stays has grown beyond the scale
                 of the dense row. Frantar & Alistarh, "SparseGPT", 2023, section 3.5.
"""

from __future__ import annotations

import dataclasses
import warnings
from functools import partial

import torch
from torch import Tensor

from qsparse.data import Dataset
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant.schemes import to_grid, to_reals
from qsparse.sparse.config import INT8, SparseConfig, check_order
from qsparse.sparse.convert import sparsify_as
from qsparse.sparse.masks import EmptyLayerWarning
from qsparse.sparse.pruning import prune
from qsparse.sparse.store import BITS, scales


def compress(model: MLP, config: SparseConfig, dataset: Dataset | None = None, order: str = "prune-first") -> MLP:
    """A copy of a dense float32 `model` with int8 weights, chosen and stored as `config` and rounded as `order` says.

    config: its dtype left out is int8. dataset: as of `prune`. Raises and warns as `prune`; UserError for an unknown
    order, for "joint" with another pruner than sparsegpt, and for a format that holds no int8.
    """
    if not isinstance(config, SparseConfig):
        raise TypeError(f"config must be a SparseConfig, such as SparseConfig(0.1), not {type(config).__name__}")
    if config.dtype not in (None, INT8):
        raise UserError(f"compress rounds to int8, not to {config.dtype}: leave the dtype out, or call sparsify.")
    config = dataclasses.replace(config, dtype=INT8)
    check_order(config, order)
    if order == "joint":
        return sparsify_as(config, *prune_jointly(model, config, dataset))[0]
    return sparsify_as(config, *prune(model, config, dataset))[0]


def prune_jointly(
    model: MLP, config: SparseConfig, dataset: Dataset | None
) -> tuple[MLP, dict[str, Tensor], dict[str, Tensor]]:
    """`model` pruned and rounded in one pass, dense; layer name -> mask (N, K) bool; layer name -> s (N,) float32."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EmptyLayerWarning)  # which the second pass gives
        alone, _ = prune(model, dataclasses.replace(config, correct_bias=False), dataset)
    s = {name: scales(layer.weight) for name, layer in alone.layers().items()}
    pruned, masks = prune(model, config, dataset, rounding={name: partial(_round, s=each) for name, each in s.items()})
    return pruned, masks, s


def _round(column: Tensor, s: Tensor) -> Tensor:
    """The values of a column (N,) of W on the grid, in its dtype."""
    s, zero = s.to(column.dtype), torch.zeros_like(s)
    return to_reals(to_grid(column, s, zero, BITS), s, zero)
