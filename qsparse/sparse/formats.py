"""Sparse storage: a dense matrix and its mask <-> CSR, COO, 2:4; an array of any dimensions <-> coordinates, bitmap.

A weight is stored where the mask is True, even if its value is zero, and nowhere else, even if its value is not: the
mask is the structure. Entries come row by row, columns ascending. Indices are int32, values keep the matrix's dtype,
everything stays on its device.

    CSR  values (nnz,), col_indices (nnz,), row_offsets (N + 1,): row i is entries row_offsets[i] to row_offsets[i + 1]
    COO  values (nnz,), rows (nnz,), cols (nnz,)

Of an array of r dimensions (for a matrix, coordinates are COO):

    coordinates  values (nnz,), r index arrays (nnz,), a dimension each
    bitmap       values (nnz,), bits uint8 (ceil(n / 8),): entry i is stored where bit i % 8 of byte i // 8 is 1

Of a matrix that keeps two of every four neighbouring columns, Kp being K rounded up to a multiple of 8:

    2:4  values (N, Kp / 2), metadata uint8 (N, Kp / 8): four bits a group of four columns, first column | second << 2,
         the columns (0 to 3) ascending; the group of the lower columns has the lower bits of its byte

Where a group keeps fewer than two, zeros of its lowest free columns are stored. Such a zero is multiplied like any
other value (by the NaN of an activation, say); a column that is not stored takes part in nothing.

Rows without entries, matrices without entries and full matrices are ordinary cases.
"""

import math

import torch
from torch import Tensor
from torch.nn import functional

from qsparse.kernels import _two_four
from qsparse.nn._common import check_tensors

_INT32_MAX = torch.iinfo(torch.int32).max


def to_csr(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """CSR of the entries of `w` (N, K) where `mask` (N, K) bool is True: (values, col_indices, row_offsets).

    Raises:
        TypeError: no tensors, or `mask` is not bool.
        ValueError: the shapes differ or are no matrix, or there are more than 2**31 - 1 entries.
    """
    values, _, cols = to_coo(w, mask)
    row_offsets = torch.zeros(w.shape[0] + 1, dtype=torch.int32, device=w.device)
    row_offsets[1:] = mask.sum(dim=1).cumsum(dim=0)
    return values, cols, row_offsets


def to_coo(w: Tensor, mask: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """COO of the entries of `w` (N, K) where `mask` (N, K) bool is True: (values, rows, cols). Raises as `to_csr`."""
    _check_mask(w, mask)
    if w.ndim != 2:
        raise ValueError(f"w and mask must be matrices of one shape, not {tuple(w.shape)} and {tuple(mask.shape)}")
    values, (rows, cols) = to_coordinates(w, mask)
    return values, rows, cols


def to_coordinates(array: Tensor, mask: Tensor) -> tuple[Tensor, tuple[Tensor, ...]]:
    """The entries of `array` (r dimensions) where `mask` (its shape, bool) is True, and r index arrays, all (nnz,).

    Raises:
        TypeError: no tensors, or `mask` is not bool.
        ValueError: the shapes differ, or there are more than 2**31 - 1 entries.
    """
    _check_mask(array, mask)
    indices = mask.nonzero(as_tuple=True)
    if mask.ndim and indices[0].numel() > _INT32_MAX:
        raise ValueError(f"int32 indices hold at most {_INT32_MAX:,} entries, not {indices[0].numel():,}")
    return array.detach()[indices], tuple(index.int() for index in indices)


def to_bitmap(array: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """Bitmap of the entries of `array` where `mask` (its shape, bool) is True: (values, bits).

    Raises:
        TypeError: no tensors, or `mask` is not bool.
        ValueError: the shapes differ.
    """
    _check_mask(array, mask)
    bits = functional.pad(mask.flatten(), (0, -mask.numel() % 8)).reshape(-1, 8)
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=mask.device)
    return array.detach()[mask], (bits * weights).sum(dim=1, dtype=torch.uint8)


def from_bitmap(values: Tensor, bits: Tensor, shape: tuple[int, ...]) -> Tensor:
    """The dense array of a bitmap, zero where nothing is stored.

    Raises:
        TypeError: no tensors.
        ValueError: bits have not the ceil(n / 8) bytes of `shape`, or not as many ones as there are values.
    """
    check_tensors(values=values, bits=bits)
    size = math.prod(shape)
    mask = (bits[:, None] >> torch.arange(8, device=bits.device)).bitwise_and(1).bool().flatten()
    if bits.shape != (math.ceil(size / 8),) or int(mask.sum()) != values.numel() or bool(mask[size:].any()):
        raise ValueError(
            f"bits must be {math.ceil(size / 8)} bytes with {values.numel()} ones, all of them inside {shape}"
        )
    dense = torch.zeros(size, dtype=values.dtype, device=values.device)
    dense[mask[:size]] = values
    return dense.reshape(shape)


def from_csr(values: Tensor, col_indices: Tensor, row_offsets: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix of a CSR matrix, zero where nothing is stored; duplicates are summed as by `from_coo`.

    Raises:
        TypeError: no tensors.
        ValueError: row_offsets do not start at 0, rise to nnz and have N + 1 entries, or an index lies outside `shape`.
    """
    check_tensors(values=values, col_indices=col_indices, row_offsets=row_offsets)
    lengths = row_offsets.long().diff()
    nnz = values.numel()
    if row_offsets.shape != (shape[0] + 1,) or int(row_offsets[0]) != 0 or int(row_offsets[-1]) != nnz:
        raise ValueError(f"row_offsets must have {shape[0] + 1} entries from 0 to {nnz} (the number of values)")
    if bool((lengths < 0).any()):
        raise ValueError(f"row_offsets decrease at entry {int((lengths < 0).nonzero()[0]) + 1}")
    rows = torch.repeat_interleave(torch.arange(shape[0], device=values.device), lengths)
    return from_coo(values, rows, col_indices, shape)


def from_coo(values: Tensor, rows: Tensor, cols: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix of a COO matrix, sorted or not, zero where nothing is stored.

    Duplicates are summed: of float16 and bfloat16 in float32, and rounded once.

    Raises:
        TypeError: no tensors.
        ValueError: the three arrays differ in length, or an index lies outside `shape`.
    """
    check_tensors(values=values, rows=rows, cols=cols)
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
    wide = torch.float32 if values.dtype in (torch.float16, torch.bfloat16) else values.dtype
    dense = torch.zeros(shape, dtype=wide, device=values.device)
    return dense.index_put_((rows.long(), cols.long()), values.to(wide), accumulate=True).to(values.dtype)


def compress_24(w: Tensor, mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """2:4 of the entries of `w` (N, K) where `mask` (N, K) bool is True, by default where `w` is not 0.

    Returns (values, metadata), which `kernels.gemm_24` and, of int8, `kernels.gemm_int8_24` take.

    Raises:
        TypeError: no tensors, or `mask` is not bool.
        ValueError: `w` is no matrix, the shapes differ, or four neighbouring columns have more than two entries.
    """
    check_tensors(w=w)
    kept = w != 0 if mask is None else mask
    _check_mask(w, kept)
    if w.ndim != 2:
        raise ValueError(f"w must be a matrix, not {tuple(w.shape)}")
    n, k = w.shape
    width = _two_four.padded(k)
    groups, kept = (functional.pad(a.detach(), (0, width - k)).reshape(n, width // 4, 4) for a in (w, kept))
    full = kept.sum(dim=2) > 2
    if bool(full.any()):
        row, group = full.nonzero()[0].tolist()
        raise ValueError(f"row {row} has more than two entries in columns {4 * group} to {4 * group + 3}: not 2:4")
    weights = 2 ** torch.arange(4, dtype=torch.uint8, device=w.device)
    pairs = torch.tensor(_PAIRS, dtype=torch.uint8, device=w.device)[(kept * weights).sum(dim=2)]
    metadata = pairs[:, ::2] | pairs[:, 1::2] << 4
    columns = _two_four.columns(metadata)
    values = torch.where(kept.gather(2, columns), groups.gather(2, columns), 0)
    return values.reshape(n, width // 2), metadata


def expand_24(values: Tensor, metadata: Tensor, shape: tuple[int, int]) -> Tensor:
    """The dense (N, K) matrix of a 2:4 matrix, zero where nothing is stored.

    Raises:
        TypeError: no tensors, or metadata is not uint8.
        ValueError: values or metadata have not the shape that belongs to `shape`, two columns of a group do not
            ascend, or something but zero is stored beyond column K.
    """
    check_tensors(values=values, metadata=metadata)
    n, k = shape
    width = _two_four.padded(k)
    if metadata.dtype != torch.uint8:
        raise TypeError(f"metadata must be uint8, not {metadata.dtype}")
    if values.shape != (n, width // 2) or metadata.shape != (n, width // 8):
        raise ValueError(
            f"values and metadata must be {(n, width // 2)} and {(n, width // 8)}, "
            f"not {tuple(values.shape)} and {tuple(metadata.shape)}"
        )
    columns = _two_four.columns(metadata)
    falling = columns[..., 0] >= columns[..., 1]
    if bool(falling.any()):
        row, group = falling.nonzero()[0].tolist()
        raise ValueError(f"row {row}: columns {columns[row, group].tolist()} of group {group} do not ascend")
    dense = _two_four.expand(values, metadata, width)
    if bool((dense[:, k:] != 0).any()):
        raise ValueError(f"values beyond column {k} are not zero")
    return dense[:, :k].contiguous()


def _pair(bits: int) -> int:
    """The metadata of a group that keeps the columns whose bits are 1, two at most."""
    first, second = sorted(sorted(range(4), key=lambda column: not bits >> column & 1)[:2])
    return first | second << 2


_PAIRS = [_pair(bits) for bits in range(16)]


def _check_mask(array: Tensor, mask: Tensor) -> None:
    check_tensors(w=array, mask=mask)
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if mask.shape != array.shape:
        kind = "matrices" if array.ndim == 2 else "arrays"
        raise ValueError(f"w and mask must be {kind} of one shape, not {tuple(array.shape)} and {tuple(mask.shape)}")
