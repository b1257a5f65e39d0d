"""Layers over ``qsparse.kernels``: ``Linear`` trains; the others infer, quantized or sparse.

Every layer has ``in_features``, ``out_features``, ``activation`` (None or "relu"), ``describe()`` (what
``from_description`` needs to make an empty one) and ``cpu_kernel()`` (what a result row shows on a CPU).
Sparse ones have ``format``, ``entries()``, and ``nnz``, the number of weights that stay (which formats of fixed places
count: on a GPU that waits).
"""

from qsparse.nn._common import stored_bytes
from qsparse.nn.bitmap_linear import BitmapLinear
from qsparse.nn.entry_linear import EntryLinear
from qsparse.nn.fp8_linear import Fp8Linear
from qsparse.nn.linear import Linear
from qsparse.nn.loss import cross_entropy
from qsparse.nn.quant_linear import QuantLinear, is_quant_network, quant_network
from qsparse.nn.quant_sparse_linear import QuantSparseLinear
from qsparse.nn.quant_two_four_linear import QuantTwoFourLinear
from qsparse.nn.sparse_linear import SparseLinear
from qsparse.nn.two_four_linear import TwoFourLinear
from qsparse.nn.weight_only_linear import WeightOnlyLinear
from qsparse.nn.zero_point_linear import ZeroPointLinear

_QUANTIZED = (QuantLinear, ZeroPointLinear, WeightOnlyLinear, Fp8Linear)
_SPARSE = (SparseLinear, QuantSparseLinear, TwoFourLinear, QuantTwoFourLinear, BitmapLinear, EntryLinear)
_KINDS = {kind.__name__: kind for kind in (Linear, *_QUANTIZED, *_SPARSE)}


def from_description(description: dict):
    """An empty layer as ``layer.describe()`` described it, ready for ``load_state_dict``; ValueError if unknown."""
    options = dict(description)
    kind = options.pop("kind", None)
    if kind not in _KINDS:
        raise ValueError(f"unknown kind of layer {kind!r}; known are {', '.join(_KINDS)}")
    return _KINDS[kind].from_description(options)


__all__ = [
    "BitmapLinear",
    "EntryLinear",
    "Fp8Linear",
    "Linear",
    "QuantLinear",
    "QuantSparseLinear",
    "QuantTwoFourLinear",
    "SparseLinear",
    "TwoFourLinear",
    "WeightOnlyLinear",
    "ZeroPointLinear",
    "cross_entropy",
    "from_description",
    "is_quant_network",
    "quant_network",
    "stored_bytes",
]
