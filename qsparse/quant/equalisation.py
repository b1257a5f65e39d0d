"""Cross-layer equalisation: give what two layers share to both alike, so that no channel is lost in another's range.

A ReLU lets a positive factor through: dividing the rows of one layer by s and multiplying the columns of the next by it
changes nothing. It needs no data. Where each row has a scale of its own only the next layer's columns gain.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section
4.1, equation 11.
"""

import itertools

import torch
from torch import Tensor

from qsparse.models import MLP

_ROUNDS = 50  # over all pairs: what one pair settles the next one moves
_SETTLED = 1e-3  # of s, from 1


def equalising(W1: Tensor, W2: Tensor) -> Tensor:
    """``s_i = sqrt(r1_i / r2_i)`` of ``r1_i = max|W1_i|`` (row i of W1) and ``r2_i = max|W2_:i|`` (column i of W2).

    W1: (N, K). W2: (L, N). Returns (N,), positive; 1 where a row or a column is all zeros.
    ``sqrt(r1 r2) / r2`` of the paper is the same, and could overflow. Rows of W1 divided by s, and columns of W2 times
    s, both reach ``sqrt(r1 r2)``.
    """
    r1, r2 = W1.abs().amax(dim=1), W2.abs().amax(dim=0)
    usable = (r1 > 0) & (r2 > 0)
    return torch.where(usable, r1.sqrt() / torch.where(usable, r2, 1).sqrt(), 1)


@torch.no_grad()
def equalise(model: MLP) -> MLP:
    """A model of the same outputs (up to rounding) whose neighbouring layers have ranges alike.

    model: dense, float32.
    """
    model = model.replace({})
    for _ in range(_ROUNDS):
        settled = True
        for before, after in itertools.pairwise(model.layers().values()):
            s = equalising(before.weight, after.weight)
            before.weight /= s[:, None]
            if before.bias is not None:
                before.bias /= s
            after.weight *= s
            settled &= bool(((s - 1).abs() < _SETTLED).all())
        if settled:
            break
    return model
