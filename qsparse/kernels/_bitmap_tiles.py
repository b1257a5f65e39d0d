"""Sparse matrices for tensor cores: tiles of 16 x 128 weights, a bit a weight and the kept ones packed.

W (N, K) is padded to whole tiles, which lie row of tiles after row of tiles. A tile is eight blocks of 8 x 32, in this
order: columns 0-31 of rows 0-7, then of rows 8-15; columns 32-63 of rows 0-7, and so on.

    masks    (tiles, 64) int32: word 32 h + 4 r + t of a tile belongs to its columns 64 h to 64 h + 63; byte q of it has
             the bits of 8 neighbours, the first lowest: row r + 8 (q % 2), from column 64 h + 32 (q / 2) + 8 t on
    values   (8 offsets[-1],), dtype of W: the weights whose bit is 1, block after block, each row by row; after those
             of a tile come zeros, at least one, up to a multiple of 8
    offsets  (tiles + 1,) int32: where the values of a tile start, in units of 8

So 32 lanes that take a word each have, in four bytes, what the tensor cores' instructions for 16 x 64 weights want of
each, and a byte's values lie side by side. For a density d that is about 2 d + 1/8 bytes a weight of 16 bits.
"""

from __future__ import annotations

import torch

ROWS, COLUMNS, CHUNK = 16, 128, 8
WORDS = ROWS * COLUMNS // 32
_INT32_MAX = 2**31 - 1
# A weight's place is (row of tiles, 8 rows, row; tile, 64 columns, 32 columns, 8 columns, column); values lie by
_ORDER = (0, 3, 4, 5, 1, 2, 6, 7)


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Tiles on top of each other, and side by side."""
    return -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)


def pack(w: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The entries of ``w`` (N, K) where ``mask`` (N, K) bool is True: (values, masks, offsets).

    Raises TypeError unless ``mask`` is bool; ValueError for shapes that differ or are no matrix, and for more entries
    than int32 offsets reach (about 2**34).
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if w.ndim != 2 or w.shape != mask.shape:
        raise ValueError(f"w and mask must be matrices of one shape, not {tuple(w.shape)} and {tuple(mask.shape)}")
    kept = _tiled(mask)
    counts = kept.sum(dim=1)
    offsets = torch.zeros(len(kept) + 1, dtype=torch.int64, device=w.device)
    offsets[1:] = (counts // CHUNK + 1).cumsum(dim=0)
    if int(offsets[-1]) > _INT32_MAX:
        raise ValueError(f"int32 offsets hold at most {CHUNK * _INT32_MAX:,} entries with their padding")
    values = torch.zeros(CHUNK * int(offsets[-1]), dtype=w.dtype, device=w.device)
    values[_places(counts, offsets)] = _tiled(w.detach())[kept]
    return values, _words(kept), offsets.int()


def unpack(values, masks, offsets, shape: tuple[int, int]) -> torch.Tensor:
    """The dense (N, K) matrix, zero where nothing is stored, of arrays that :func:`check` accepts."""
    kept = _bits(masks)
    dense = torch.zeros(kept.shape, dtype=values.dtype, device=values.device)
    dense[kept] = values[_places(kept.sum(dim=1), offsets.long())]
    return _untiled(dense, shape)


def check(values, masks, offsets, shape: tuple[int, int]) -> None:
    """Raise ValueError unless offsets, masks and values fit each other and ``shape``. On a GPU this waits for it."""
    kept = _bits(masks)
    rises, wanted = offsets.diff().long(), kept.sum(dim=1) // CHUNK + 1
    if int(offsets[0]) != 0 or values.numel() != CHUNK * int(offsets[-1]):
        ends = f"{int(offsets[0])} to {int(offsets[-1])}"
        raise ValueError(f"offsets must go from 0 to an eighth of the {values.numel()} values, got {ends}")
    if bool((rises != wanted).any()):
        at = int((rises != wanted).nonzero()[0])
        raise ValueError(f"offsets[{at + 1}] is {int(offsets[at + 1])}, but by the ones of masks[{at}] it must be "
                         f"{int(offsets[at] + wanted[at])}")  # fmt: skip
    if not torch.equal(_tiled(_untiled(kept, shape)), kept):
        raise ValueError(f"masks has ones outside the matrix of shape {tuple(shape)}")


def _places(counts, offsets) -> torch.Tensor:
    """Where among the padded values each entry lies."""
    total, first = int(counts.sum()), counts.cumsum(dim=0) - counts
    return torch.arange(total, device=counts.device) + (CHUNK * offsets[:-1] - first).repeat_interleave(counts)


def _tiled(a: torch.Tensor) -> torch.Tensor:
    """(N, K) as (tiles, 2048), each tile in the order of its values."""
    (n, k), (tall, wide) = a.shape, grid(a.shape)
    padded = a.new_zeros((tall * ROWS, wide * COLUMNS))
    padded[:n, :k] = a
    return padded.reshape(tall, 2, 8, wide, 2, 2, 4, 8).permute(_ORDER).reshape(tall * wide, ROWS * COLUMNS)


def _untiled(tiles: torch.Tensor, shape: tuple[int, int]) -> torch.Tensor:
    (n, k), (tall, wide) = shape, grid(shape)
    back = [_ORDER.index(axis) for axis in range(len(_ORDER))]
    whole = tiles.reshape(tall, wide, 2, 2, 2, 8, 4, 8).permute(back).reshape(tall * ROWS, wide * COLUMNS)
    return whole[:n, :k].contiguous()


def _words(kept: torch.Tensor) -> torch.Tensor:
    """A tile's bits, block (half, q) after block, as words (half, lane) of bytes q."""
    weights = 2 ** torch.arange(8, dtype=torch.uint8, device=kept.device)
    octets = (kept.reshape(-1, 8) * weights).sum(dim=1, dtype=torch.uint8)
    return octets.reshape(-1, 2, 4, 32).transpose(2, 3).reshape(-1).view(torch.int32).reshape(-1, WORDS)


def _bits(masks: torch.Tensor) -> torch.Tensor:
    octets = masks.contiguous().view(torch.uint8).reshape(-1, 2, 32, 4).transpose(2, 3).reshape(-1, 1)
    ones = octets >> torch.arange(8, dtype=torch.uint8, device=masks.device) & 1
    return ones.bool().reshape(-1, ROWS * COLUMNS)
