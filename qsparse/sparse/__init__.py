"""Sparsity: dense model in, masks out (pruning.py); masks in, stored formats out (formats.py); layers (store.py), of
which the cheapest may be chosen (choose.py), and models of them (convert.py).

A pruner is a file: magnitude.py, random_scores.py, wanda.py, snip.py, sparsegpt.py, movement.py. How many weights each
layer keeps is settled in distribution.py, which ones by their scores in masks.py, as whole blocks in blocks.py, or in
the best order of the columns in permutation.py. What stays may be rounded to int8 (int8.py). While a network trains:
gradual.py, dynamic.py, lottery.py; afterwards finetune.py. A single product with sparse weights, the fastest way
measured: product.py.

Importing this imports no torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsparse.sparse.config import DISTRIBUTIONS, FORMATS, PRUNERS, SparseConfig, check_density, parse_pattern

if TYPE_CHECKING:
    from qsparse.sparse.bitmap_tiles import csr_to_bitmap_tiles, from_bitmap_tiles, to_bitmap_tiles
    from qsparse.sparse.choose import choose_formats
    from qsparse.sparse.convert import prunable_weights, sparsify, sparsify_as
    from qsparse.sparse.distribution import layer_counts
    from qsparse.sparse.entry_tiles import csr_to_entry_tiles, from_entry_tiles, to_entry_tiles
    from qsparse.sparse.formats import compress_24, expand_24, from_coo, from_csr, to_coo, to_csr
    from qsparse.sparse.int8 import compress
    from qsparse.sparse.magnitude import magnitude_masks
    from qsparse.sparse.masks import EmptyLayerWarning, mask_density
    from qsparse.sparse.product import SparseWeights, spmm
    from qsparse.sparse.pruning import prune

__all__ = [
    "DISTRIBUTIONS",
    "FORMATS",
    "PRUNERS",
    "EmptyLayerWarning",
    "SparseConfig",
    "SparseWeights",
    "check_density",
    "choose_formats",
    "compress",
    "compress_24",
    "csr_to_bitmap_tiles",
    "csr_to_entry_tiles",
    "expand_24",
    "from_bitmap_tiles",
    "from_coo",
    "from_csr",
    "from_entry_tiles",
    "layer_counts",
    "magnitude_masks",
    "mask_density",
    "parse_pattern",
    "prunable_weights",
    "prune",
    "sparsify",
    "sparsify_as",
    "spmm",
    "to_bitmap_tiles",
    "to_coo",
    "to_csr",
    "to_entry_tiles",
]

_PLACES = {
    "EmptyLayerWarning": "masks",
    "SparseWeights": "product",
    "choose_formats": "choose",
    "compress": "int8",
    "compress_24": "formats",
    "csr_to_bitmap_tiles": "bitmap_tiles",
    "csr_to_entry_tiles": "entry_tiles",
    "expand_24": "formats",
    "from_bitmap_tiles": "bitmap_tiles",
    "from_coo": "formats",
    "from_csr": "formats",
    "from_entry_tiles": "entry_tiles",
    "layer_counts": "distribution",
    "magnitude_masks": "magnitude",
    "mask_density": "masks",
    "prunable_weights": "convert",
    "prune": "pruning",
    "sparsify": "convert",
    "sparsify_as": "convert",
    "spmm": "product",
    "to_bitmap_tiles": "bitmap_tiles",
    "to_coo": "formats",
    "to_csr": "formats",
    "to_entry_tiles": "entry_tiles",
}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
