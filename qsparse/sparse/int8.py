"""Both at once: weights that are pruned and rounded to int8, stored in CSR.

Symbols: W (N, K) the weights of a layer, m its mask, s (N,) one scale an output channel, Q = rint(W / s) int8.

    prune-first  a pruner chooses m, and fine-tuning may follow; then s = max |W| of what stays of a row / 127
    joint        SparseGPT and the rounding in one pass: the columns to the right make up for what pruning and rounding
                 lose of a column. s is that of a pass that only prunes, by which what stays has grown beyond the scale
                 of the dense row. Frantar & Alistarh, "SparseGPT", 2023, section 3.5.
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.data import Dataset
from qsparse.dense import dense_layers
from qsparse.models import MLP
from qsparse.nn import Linear, QuantSparseLinear
from qsparse.quant.schemes import to_grid, to_reals
from qsparse.sparse.config import SparseConfig, check_int8
from qsparse.sparse.formats import to_csr
from qsparse.sparse.pruning import prune

_BITS = 8


def compress(model: MLP, config: SparseConfig, dataset: Dataset | None = None, order: str = "prune-first") -> MLP:
    """A copy of a dense float32 `model` with int8 weights in CSR, chosen as `config` and rounded as `order` says.

    dataset: as of `prune`. Raises and warns as `prune`; UserError for an unknown order, for "joint" with another
    pruner than sparsegpt, and for another format than csr.
    """
    check_int8(config, order)
    if order == "joint":
        return prune_jointly(model, config, dataset)[0]
    pruned, masks = prune(model, config, dataset)
    return quantize_kept(pruned, masks)


def prune_jointly(model: MLP, config: SparseConfig, dataset: Dataset | None) -> tuple[MLP, dict[str, Tensor]]:
    """`model` pruned and rounded in one pass, and the masks: layer name -> (N, K) bool."""
    alone, _ = prune(model, config, dataset)
    scales = {name: _scales(layer.weight) for name, layer in alone.layers().items()}
    pruned, masks = prune(model, config, dataset, rounding={name: partial(_round, s=s) for name, s in scales.items()})
    return quantize_kept(pruned, masks, scales), masks


def quantize_kept(model: MLP, masks: dict[str, Tensor], scales: dict[str, Tensor] | None = None) -> MLP:
    """A copy of a dense `model` that stores the weights where `masks` are True, rounded to int8, and no others.

    masks: layer name -> (N, K) bool, for every layer. scales: layer name -> s (N,) float32; None: of what stays.
    Biases stay float32. Raises UserError for a model that is already compressed, or not finite.
    """
    layers = dense_layers(model, "sparsify")
    return model.replace({name: _layer(each, masks[name], scales and scales[name]) for name, each in layers.items()})


def _layer(layer: Linear, mask: Tensor, s: Tensor | None) -> QuantSparseLinear:
    mask = mask.to(layer.weight.device)
    W = layer.weight.detach().float().masked_fill(~mask, 0.0)
    s = _scales(W) if s is None else s
    Q = to_grid(W, s[:, None], torch.zeros_like(s)[:, None], _BITS).to(torch.int8)
    options = {"shape": tuple(W.shape), "bias": layer.bias, "activation": layer.activation}
    return QuantSparseLinear.from_integers(*to_csr(Q, mask), s, **options)


def _scales(W: Tensor) -> Tensor:
    return kernels.quantize_rows(W.detach().float())[1]


def _round(column: Tensor, s: Tensor) -> Tensor:
    """The values of a column (N,) of W on the grid, in its dtype."""
    s, zero = s.to(column.dtype), torch.zeros_like(s)
    return to_reals(to_grid(column, s, zero, _BITS), s, zero)
