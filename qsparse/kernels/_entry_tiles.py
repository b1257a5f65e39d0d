"""Sparse matrices for tensor cores: tiles of 32 x 64 weights, each stored weight with its place in 4 bytes.

    entries  (4 offsets[-1],) int32: the lower half has the bits of a weight of 16 bits, the upper half says where in a
             tile that is written out it belongs, in bytes: see `_weight_tiles_sm80.place`. A tile's entries are filled
             up to a multiple of 4 by repeating its last one
    offsets  (tiles + 1,) int32: where the entries of a tile start, in units of 4

A lane takes 4 neighbouring entries and stores one after the other, so a warp stores entries 4 apart: these are chosen
from different banks of shared memory, as far as the tile has them.
"""

from __future__ import annotations

import torch

from qsparse.kernels._face import check_tensor
from qsparse.kernels._weight_tiles_sm80 import CHUNK, COLUMNS, PLACES, ROWS, grid, lane_by_lane, place, where, within

DTYPES = (torch.float16, torch.bfloat16)
_BANKS = 32


def pack(w: torch.Tensor, mask: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The entries of ``w`` (N, K), of 16 bits, where ``mask`` (N, K) bool is True: (entries, offsets).

    Raises TypeError unless ``mask`` is bool and ``w`` float16 or bfloat16; ValueError for shapes that differ or are no
    matrix, and for more entries than int32 offsets reach (about 2**33).
    """
    if mask.dtype != torch.bool:
        raise TypeError(f"mask must be bool, not {mask.dtype}")
    if w.dtype not in DTYPES:
        raise TypeError(f"w must be float16 or bfloat16, not {w.dtype}")
    if w.ndim != 2 or w.shape != mask.shape:
        raise ValueError(f"w and mask must be matrices of one shape, not {tuple(w.shape)} and {tuple(mask.shape)}")
    tall, wide = grid(w.shape)
    row, column = mask.nonzero(as_tuple=True)
    bits = w.detach()[row, column].view(torch.int16).long() & 0xFFFF
    tile, at = row // ROWS * wide + column // COLUMNS, place(row % ROWS, column % COLUMNS)
    # in turns: the first entry of every bank, then the second of every bank, and so on
    bank = tile * _BANKS + at // 4 % _BANKS
    by_bank = torch.argsort(bank, stable=True)
    turn = torch.empty_like(bank)
    turn[by_bank] = within(torch.bincount(bank, minlength=tall * wide * _BANKS))
    order = torch.argsort((tile * PLACES + turn) * _BANKS + bank % _BANKS)
    entries, offsets = lane_by_lane((at << 16 | bits)[order], torch.bincount(tile, minlength=tall * wide), None)
    return (entries - (entries >> 31 << 32)).int(), offsets


def unpack(entries, offsets, shape: tuple[int, int], dtype: torch.dtype) -> torch.Tensor:
    """The dense (N, K) matrix, zero where nothing is stored, of arrays that :func:`check` accepts."""
    return _spread(_bits(entries), entries, offsets, shape).view(dtype)


def rounded(entries: torch.Tensor, dtype: torch.dtype, to: torch.dtype) -> torch.Tensor:
    """The same entries with their weights, of ``dtype``, in the dtype ``to``, both of 16 bits."""
    return entries >> 16 << 16 | _bits(entries).view(dtype).to(to).view(torch.int16).int() & 0xFFFF


def stored(entries, offsets, shape: tuple[int, int]) -> torch.Tensor:
    """Where an entry is stored, (N, K) bool."""
    return _spread(torch.ones_like(entries, dtype=torch.bool), entries, offsets, shape)


def check(entries, offsets, shape: tuple[int, int]) -> None:
    """Raise TypeError or ValueError unless offsets and entries fit each other and ``shape``. On a GPU this waits."""
    tall, wide = grid(shape)
    check_tensor("entries", entries, (torch.int32,), (None,))
    check_tensor("offsets", offsets, (torch.int32,), (tall * wide + 1,))
    if int(offsets[0]) != 0 or entries.numel() != CHUNK * int(offsets[-1]):
        ends = f"{int(offsets[0])} to {int(offsets[-1])}"
        raise ValueError(f"offsets must go from 0 to a fourth of the {entries.numel()} entries, got {ends}")
    if bool((offsets.diff() < 0).any()):
        at = int((offsets.diff() < 0).nonzero()[0])
        raise ValueError(f"offsets[{at + 1}] is {int(offsets[at + 1])}, below offsets[{at}]")
    places, tile = _places(entries), _tiles(offsets)
    row, column = where(places)
    row, column = row + tile // max(wide, 1) * ROWS, column + tile % max(wide, 1) * COLUMNS
    outside = (places % 2 > 0) | (places >= 2 * PLACES) | (row >= shape[0]) | (column >= shape[1])
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(f"entries[{at}] has a place outside the matrix of shape {tuple(shape)}: {int(places[at])}")
    key = tile * PLACES + places // 2
    order = torch.argsort(key)
    twice = (key[order].diff() == 0) & (entries[order].diff() != 0)
    if bool(twice.any()):
        at = int(order[int(twice.nonzero()[0]) + 1])
        raise ValueError(f"entries[{at}] has the place of another entry of its tile, which differs")


def _bits(entries: torch.Tensor) -> torch.Tensor:
    """The lower halves, int16."""
    return ((entries & 0xFFFF) - ((entries & 0x8000) << 1)).short()


def _places(entries: torch.Tensor) -> torch.Tensor:
    return entries.long() >> 16 & 0xFFFF


def _tiles(offsets: torch.Tensor) -> torch.Tensor:
    """The tile of each entry."""
    return torch.repeat_interleave(torch.arange(len(offsets) - 1, device=offsets.device), CHUNK * offsets.long().diff())


def _spread(what: torch.Tensor, entries, offsets, shape: tuple[int, int]) -> torch.Tensor:
    """``what`` of each entry, at its place in a matrix (N, K) of zeros."""
    (n, k), (tall, wide), tile = shape, grid(shape), _tiles(offsets)
    row, column = where(_places(entries))
    whole = what.new_zeros((tall * ROWS, wide * COLUMNS))
    whole[tile // max(wide, 1) * ROWS + row, tile % max(wide, 1) * COLUMNS + column] = what
    return whole[:n, :k].contiguous()
