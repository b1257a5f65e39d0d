"""Block pruning: whole rectangles of a weight matrix stay or go, so that what stays can be read in one piece.

Narang et al., "Block-Sparse Recurrent Neural Networks", 2017. Symbols:

    S  (N, K)  scores of the weights, larger for one that matters more
    r x c      a block; those at the right and the lower edge are short where r and c do not divide N and K
    B_uv = the mean of S over block (u, v) (the paper takes the maximum; a mean treats short blocks alike)

The blocks of the largest B stay, of equal ones the earlier (row by row of blocks).
"""

from __future__ import annotations

import warnings

import torch
from torch import Tensor


class BlockWarning(UserWarning):
    """A layer is smaller than a block."""


def largest_blocks(scores: Tensor, count: int, block: tuple[int, int]) -> Tensor:
    """The mask (N, K) of the best whole blocks that hold `count` weights together, or less than one block fewer."""
    means, sizes = _means(scores, block)
    order = torch.sort(means.flatten(), descending=True, stable=True).indices
    stay = torch.zeros(means.numel(), dtype=torch.bool, device=scores.device)
    stay[order] = sizes.flatten()[order].cumsum(dim=0) <= count
    return _spread(stay.reshape(means.shape), scores.shape, block)


def block_means(scores: Tensor, block: tuple[int, int]) -> Tensor:
    """B of each weight's block, (N, K): scores that rank the blocks of several layers against each other."""
    return _spread(_means(scores, block)[0], scores.shape, block)


def warn_of_small(shapes: dict[str, torch.Size], block: tuple[int, int], stacklevel: int = 2) -> None:
    """Give a BlockWarning for each layer that a block does not fit into, naming it."""
    for name, (n, k) in shapes.items():
        if n < block[0] or k < block[1]:
            warnings.warn(
                f"Layer {name} ({n} x {k}) is too small for a block of {block[0]} x {block[1]}: "
                f"its blocks are {min(n, block[0])} x {min(k, block[1])}.",
                BlockWarning,
                stacklevel=stacklevel + 1,
            )


def _means(scores: Tensor, block: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """B, and how many weights each block has, both (ceil(N / r), ceil(K / c))."""
    (n, k), (r, c) = scores.shape, block
    rows, cols = (torch.arange(size, device=scores.device) // step for size, step in ((n, r), (k, c)))
    shape = -(-n // r), -(-k // c)
    sums = scores.new_zeros(shape[0], k, dtype=torch.float64).index_add_(0, rows, scores.double())
    sums = sums.new_zeros(shape).index_add_(1, cols, sums)
    sizes = torch.bincount(rows, minlength=shape[0])[:, None] * torch.bincount(cols, minlength=shape[1])
    return sums / sizes, sizes


def _spread(values: Tensor, shape: torch.Size, block: tuple[int, int]) -> Tensor:
    """One value a block -> one a weight."""
    return values.repeat_interleave(block[0], dim=0).repeat_interleave(block[1], dim=1)[: shape[0], : shape[1]]
