"""Sparse storage: a dense matrix and its mask <-> CSR and COO.

A weight is stored where the mask is True, even if its value is zero, and nowhere else, even if its value is not: the
mask is the structure. Entries come row by row, columns ascending. Indices are int32, values keep the matrix's dtype,
everything stays on its device.

    CSR  values (nnz,), col_indices (nnz,), row_offsets (N + 1,): row i is entries row_offsets[i] to row_offsets[i + 1]
    COO  values (nnz,), rows (nnz,), cols (nnz,)

Rows without entries, matrices without entries and full matrices are ordinary cases.
"""

import torch
from torch import Tensor

_INT32_MAX = torch.iinfo(torch.int32).max


def to_csr(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CSR of the entries of `w` (N, K) where `mask` (N, K) bool is True: (values, col_indices, row_offsets).

    Raises:
        TypeError: `mask` is not bool.
        ValueError: the shapes differ or are no matrix, or there are more than 2**31 - 1 entries.
    """
    values, _, cols = to_coo(w, mask)
    row_offsets = torch.zeros(w.shape[0] + 1, dtype=torch.int32, device=w.device)
    row_offsets[1:] = mask.sum(dim=1).cumsum(dim=0)
    return values, cols, row_offsets


def to_coo(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """COO of the entries of `w` (N, K) where `mask` (N, K) bool is True: (values, rows, cols). Raises as `to_csr`."""
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if w.ndim != 2 or mask.shape != w.shape:
        raise ValueError(f"w and mask must be matrices of one shape, not {tuple(w.shape)} and {tuple(mask.shape)}")
    rows, cols = mask.nonzero(as_tuple=True)
    if rows.numel() > _INT32_MAX:
        raise ValueError(f"int32 indices hold at most {_INT32_MAX:,} entries, not {rows.numel():,}")
    return w.detach()[rows, cols], rows.int(), cols.int()


def from_csr(values: Tensor, col_indices: Tensor, row_offsets: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix of a CSR matrix, zero where nothing is stored; duplicates are summed.

    Raises:
        ValueError: row_offsets do not start at 0, rise to nnz and have N + 1 entries, or an index lies outside `shape`.
    """
    lengths = row_offsets.long().diff()
    nnz = values.numel()
    if row_offsets.shape != (shape[0] + 1,) or int(row_offsets[0]) != 0 or int(row_offsets[-1]) != nnz:
        raise ValueError(f"row_offsets must have {shape[0] + 1} entries from 0 to {nnz} (the number of values)")
    if bool((lengths < 0).any()):
        raise ValueError(f"row_offsets decrease at entry {int((lengths < 0).nonzero()[0]) + 1}")
    rows = torch.repeat_interleave(torch.arange(shape[0], device=values.device), lengths)
    return from_coo(values, rows, col_indices, shape)


def from_coo(values: Tensor, rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix of a COO matrix, sorted or not, zero where nothing is stored; duplicates are summed.

    Raises:
        ValueError: the three arrays differ in length, or an index lies outside `shape`.
    """
    if not values.shape == rows.shape == cols.shape:
        raise ValueError(
            "values, rows and cols must have one length, not "
            f"{tuple(values.shape)}, {tuple(rows.shape)} and {tuple(cols.shape)}"
        )
    for name, index, size in (("row", rows, shape[0]), ("column", cols, shape[1])):
        outside = (index < 0) | (index >= size)
        if bool(outside.any()):
            entry = int(outside.nonzero()[0])
            raise ValueError(f"entry {entry} has {name} index {int(index[entry])}, outside 0..{size - 1}")
    dense = torch.zeros(shape, dtype=values.dtype, device=values.device)
    return dense.index_put_((rows.long(), cols.long()), values, accumulate=True)
