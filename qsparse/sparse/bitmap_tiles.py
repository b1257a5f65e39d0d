"""Bitmap tiles, the sparse storage that tensor cores multiply, from and to dense and CSR matrices.

The layout is described where the kernels read it, in :mod:`qsparse.kernels._bitmap_tiles`.
"""

import torch
from torch import Tensor

from qsparse.kernels import _bitmap_tiles
from qsparse.nn._common import check_tensors
from qsparse.sparse.formats import from_csr


def to_bitmap_tiles(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The entries of `w` (N, K) where `mask` (N, K) bool is True: (values, masks, offsets).

    Raises:
        TypeError: no tensors, or `mask` is not bool.
        ValueError: the shapes differ or are no matrix, or there are more than about 2**34 entries.
    """
    check_tensors(w=w, mask=mask)
    return _bitmap_tiles.pack(w, mask)


def from_bitmap_tiles(values: Tensor, masks: Tensor, offsets: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix, zero where nothing is stored.

    Raises:
        TypeError: no tensors.
        ValueError: the arrays do not fit `shape` and each other, or a bit lies outside `shape`.
    """
    check_tensors(values=values, masks=masks, offsets=offsets)
    tall, wide = _bitmap_tiles.grid(shape)
    tiles = tall * wide
    if masks.shape != (tiles, _bitmap_tiles.WORDS) or offsets.shape != (tiles + 1,):
        raise ValueError(
            f"{tuple(shape)} has {tiles} tiles: masks must be ({tiles}, {_bitmap_tiles.WORDS}) and offsets "
            f"({tiles + 1},), not {tuple(masks.shape)} and {tuple(offsets.shape)}"
        )
    _bitmap_tiles.check(values, masks, offsets, shape)
    return _bitmap_tiles.unpack(values, masks, offsets, shape)


def csr_to_bitmap_tiles(
    values: Tensor, col_indices: Tensor, row_offsets: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor, Tensor]:
    """The bitmap tiles of a CSR matrix; duplicates are summed, stored zeros stay stored. Raises as `from_csr`."""
    check_tensors(values=values)
    stored = from_csr(torch.ones_like(values, dtype=torch.float32), col_indices, row_offsets, shape) > 0
    return to_bitmap_tiles(from_csr(values, col_indices, row_offsets, shape), stored)
