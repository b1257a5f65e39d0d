"""What an array takes in each format at a density, and below which density a format is smaller than the dense array.

The arrays of a format are built and their bytes counted. Bytes grow by the same step with each entry (values and
indices) from what an empty array takes (row offsets, bits), so two small builds give the break-even. 2:4 takes the same
at any density: of each 8 entries along the last dimension 4 values and a byte, the last eight padded. The bitmap is the
plain one, of any array; the one of a network's layers lies in tiles, and takes a little more. The entries' tiles are
filled up to multiples of 4 entries, which their break-even leaves out.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from qsparse.errors import UserError
from qsparse.sparse.config import check_density, choose
from qsparse.sparse.entry_tiles import entry_tiles_bytes
from qsparse.sparse.formats import compress_24, to_bitmap, to_coordinates, to_csr
from qsparse.sparse.masks import largest

DTYPES = ("float32", "float16", "bfloat16", "int8")
_MOST = 2**26
_MOST_OF_2OF4 = 0.5


@dataclass(frozen=True)
class Size:
    """The bytes of one format.

    arrays: array name -> its bytes. ratio: to the dense array. break_even: the density below which this format is
    smaller than the dense array; 0 where it never is; None for the dense array itself.
    """

    format: str
    bytes: int
    arrays: dict[str, int]
    ratio: float
    break_even: float | None


@dataclass(frozen=True)
class Comparison:
    """The sizes of one array in all formats that hold it; the dense one first."""

    shape: tuple[int, ...]
    dtype: str
    density: float
    nnz: int
    sizes: list[Size]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse formats --json` prints."""
        return {**asdict(self), "shape": list(self.shape)}


def compare(shape: tuple[int, ...], density: float, dtype: str = "float32", *, seed: int = 0) -> Comparison:
    """The bytes of an array of `shape` (1 to 3 dimensions) with round(density * n) entries, anywhere, in each format.

    dtype: of the values: float32, float16, bfloat16 or int8. Indices are int32. seed: of where the entries are (which
    changes no size).

    A format that cannot hold the array has no entry: CSR is for matrices, the tiles of entries for those of 16 bits,
    2:4 for densities up to 0.5 (of entries that keep to its pattern).

    Raises UserError for a density outside (0, 1], a shape that is none, or one of more than 2^26 entries.
    """
    density = check_density(density)
    choose("dtype", dtype, DTYPES)
    if not 1 <= len(shape) <= 3 or min(shape) < 1 or math.prod(shape) > _MOST:
        raise UserError(
            f"The shape must be 1 to 3 sizes of at least 1, {_MOST:,} entries at most, not "
            f"{' x '.join(map(str, shape)) or 'nothing'}"
        )
    array = torch.ones(shape, dtype=getattr(torch, dtype))
    scores = torch.rand(shape, generator=torch.Generator().manual_seed(seed))
    nnz = round(density * array.numel())
    mask, none = largest(scores, nnz), torch.zeros(shape, dtype=torch.bool)
    one = none.clone()
    one.view(-1)[0] = True

    dense = array.nbytes
    sizes = [Size("dense", dense, {"values": dense}, 1.0, None)]
    for name, build in _BUILDERS.items():
        if name == "csr" and len(shape) != 2:
            continue
        arrays = {part: tensor.nbytes for part, tensor in build(array, mask).items()}
        empty, step = (sum(tensor.nbytes for tensor in build(array, m).values()) for m in (none, one))
        break_even = min(max((dense - empty) / ((step - empty) * array.numel()), 0.0), 1.0)
        total = sum(arrays.values())
        sizes.append(Size(name, total, arrays, total / dense, break_even))
    if len(shape) == 2 and array.dtype in (torch.float16, torch.bfloat16):
        parts = dict(zip(("entries", "offsets"), entry_tiles_bytes(mask), strict=True))
        total = sum(parts.values())
        break_even = max((dense - parts["offsets"]) / (4 * array.numel()), 0.0)  # 4 bytes an entry
        sizes.append(Size("entries", total, parts, total / dense, break_even))
    if density <= _MOST_OF_2OF4:
        values, metadata = compress_24(array.reshape(-1, shape[-1]), none.reshape(-1, shape[-1]))
        arrays = {"values": values.nbytes, "metadata": metadata.nbytes}
        total = sum(arrays.values())
        sizes.append(Size("2:4", total, arrays, total / dense, _MOST_OF_2OF4 if total < dense else 0.0))
    return Comparison(tuple(shape), dtype, density, nnz, sizes)


def parse_shape(text: str) -> tuple[int, ...]:
    """`"1024,784"` as (1024, 784). Raises UserError for anything but whole numbers and commas."""
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise UserError(f"The shape must be sizes with commas between, such as 1024,784, not {text!r}") from None


def _coo(array: Tensor, mask: Tensor) -> dict[str, Tensor]:
    values, indices = to_coordinates(array, mask)
    return {"values": values, **{f"index {i}": index for i, index in enumerate(indices)}}


def _csr(array: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return dict(zip(("values", "col_indices", "row_offsets"), to_csr(array, mask), strict=True))


def _bitmap(array: Tensor, mask: Tensor) -> dict[str, Tensor]:
    return dict(zip(("values", "bits"), to_bitmap(array, mask), strict=True))


_BUILDERS = {"coo": _coo, "csr": _csr, "bitmap": _bitmap}
