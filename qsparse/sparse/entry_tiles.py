"""Tiles of entries, the sparse storage that tensor cores multiply fastest, from and to dense and CSR matrices.

The layout is described where the kernels read it, in :mod:`qsparse.kernels._entry_tiles`.
"""

import torch
from torch import Tensor

from qsparse.kernels import _entry_tiles, _spmm, _weight_tiles_sm80
from qsparse.kernels._face import check_dtype
from qsparse.nn._common import check_tensors
from qsparse.sparse.formats import from_csr


def to_entry_tiles(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The entries of `w` (N, K), float16 or bfloat16, where `mask` (N, K) bool is True: (entries, offsets).

    Raises:
        TypeError: no tensors, `w` has another dtype, or `mask` is not bool.
        ValueError: the shapes differ or are no matrix, or there are more than about 2**33 entries.
    """
    check_tensors(w=w, mask=mask)
    return _entry_tiles.pack(w, mask)


def entry_tiles_bytes(mask: Tensor) -> tuple[int, int]:
    """The bytes of what `to_entry_tiles` makes of such a `mask` (N, K) bool: (entries, offsets)."""
    tall, wide = _weight_tiles_sm80.grid(tuple(mask.shape))
    rows, columns = tall * _weight_tiles_sm80.ROWS, wide * _weight_tiles_sm80.COLUMNS
    padded = torch.nn.functional.pad(mask, (0, columns - mask.shape[1], 0, rows - mask.shape[0]))
    counts = padded.view(tall, _weight_tiles_sm80.ROWS, wide, _weight_tiles_sm80.COLUMNS).sum(dim=(1, 3))
    chunks = -(-counts // _weight_tiles_sm80.CHUNK)
    return 4 * _weight_tiles_sm80.CHUNK * int(chunks.sum()), 4 * (tall * wide + 1)


def from_entry_tiles(entries: Tensor, offsets: Tensor, shape: tuple[int, int], dtype: torch.dtype) -> Tensor:
    """The dense (N, K) matrix of `dtype`, that of what was packed; zero where nothing is stored.

    Raises:
        TypeError: no int32 tensors, or another `dtype` than float16 and bfloat16.
        ValueError: the arrays do not fit `shape` and each other, or a place lies outside `shape`.
    """
    check_tensors(entries=entries, offsets=offsets)
    check_dtype("dtype", dtype, _entry_tiles.DTYPES)
    shape = _spmm.check_sizes(shape)
    _entry_tiles.check(entries, offsets, shape)
    return _entry_tiles.unpack(entries, offsets, shape, dtype)


def csr_to_entry_tiles(
    values: Tensor, col_indices: Tensor, row_offsets: Tensor, shape: tuple[int, int]
) -> tuple[Tensor, Tensor]:
    """The tiles of a CSR matrix; stored zeros stay stored, duplicates are summed as by `from_csr`, which raises."""
    check_tensors(values=values)
    stored = from_csr(torch.ones_like(values, dtype=torch.float32), col_indices, row_offsets, shape) > 0
    return to_entry_tiles(from_csr(values, col_indices, row_offsets, shape), stored)
