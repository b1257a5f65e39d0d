"""Sparsity: dense model in, masks out (prune.py); masks in, stored formats out (formats.py); models (convert.py).

A pruner is a file: magnitude.py, random_scores.py, wanda.py, snip.py, sparsegpt.py. How many weights each layer keeps
is settled in distribution.py, which ones by their scores in masks.py.
"""

from qsparse.sparse.config import DISTRIBUTIONS, FORMATS, PRUNERS, SparseConfig, check_density, parse_pattern
from qsparse.sparse.convert import prunable_weights, sparsify
from qsparse.sparse.distribution import layer_counts
from qsparse.sparse.formats import from_coo, from_csr, to_coo, to_csr
from qsparse.sparse.magnitude import magnitude_masks
from qsparse.sparse.masks import EmptyLayerWarning, mask_density
from qsparse.sparse.prune import prune

__all__ = [
    "DISTRIBUTIONS",
    "FORMATS",
    "PRUNERS",
    "EmptyLayerWarning",
    "SparseConfig",
    "check_density",
    "from_coo",
    "from_csr",
    "layer_counts",
    "magnitude_masks",
    "mask_density",
    "parse_pattern",
    "prunable_weights",
    "prune",
    "sparsify",
    "to_coo",
    "to_csr",
]
