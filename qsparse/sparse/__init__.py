"""Sparsity: dense weights in, masks out (masks.py); masks in, stored formats out (formats.py); models (convert.py)."""

from qsparse.sparse.convert import FORMATS, prunable_weights, sparsify
from qsparse.sparse.formats import from_coo, from_csr, to_coo, to_csr
from qsparse.sparse.masks import EmptyLayerWarning, check_density, magnitude_masks, mask_density

__all__ = [
    "FORMATS",
    "EmptyLayerWarning",
    "check_density",
    "from_coo",
    "from_csr",
    "magnitude_masks",
    "mask_density",
    "prunable_weights",
    "sparsify",
    "to_coo",
    "to_csr",
]
