"""Tiles of weights for tensor cores, and how few rows of x are multiplied by them: the host side of
``common/weight_tiles_sm80.cuh``, which ``spmm_csr_few_sm80.cu`` and ``spmm_entries_sm80.cu`` share.

W (N, K) is padded to whole tiles of 32 x 64, row of tiles after row of tiles. A tile that is written out in shared
memory has eight fragments of 16 rows and 16 columns: rows 0-15, then 16-31; of each columns 0-31, then 32-63; of these
the first and then the second four of each 8 neighbours. In a fragment lane 4 r + t has 16 bytes: of its 4 neighbours,
which are columns 8 t and on, two of row r, two of row r + 8, then the other two of each.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

ROWS, COLUMNS = 32, 64
PLACES = ROWS * COLUMNS
CHUNK, LANES = 4, 32  # entries that a lane loads at once; lanes
FEW_ROWS = 64  # of x: with more of them a dense matrix, made once, is the faster way
# About what a wave of blocks costs on an H200, by the rows of x and the warps of a block.
_COST = {(8, 32): 1.0, (8, 16): 1.0, (16, 16): 1.2, (32, 16): 1.6, (32, 8): 2.5}
_RESIDENT = 16  # warps of a multiprocessor that has several blocks
_MOST_TILES = 31  # along K that a warp may have
_TILE = 2 * PLACES  # bytes of shared memory a warp


def grid(shape: tuple[int, int]) -> tuple[int, int]:
    """Tiles on top of each other, and side by side."""
    return -(-shape[0] // ROWS), -(-shape[1] // COLUMNS)


def place(row: torch.Tensor, column: torch.Tensor) -> torch.Tensor:
    """In bytes, where in a tile that is written out a weight lies."""
    fragment = row // 16 * 4 + column // 32 * 2 + column % 8 // 4
    lane = row % 8 * 4 + column % 32 // 8
    return 2 * (fragment * 256 + lane * 8 + column % 4 // 2 * 4 + row % 16 // 8 * 2 + column % 2)


def where(places: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Row and column of the weight at a place."""
    fragment, lane, element = places // 512, places // 16 % LANES, places // 2 % 8
    row = fragment // 4 * 16 + element // 2 % 2 * 8 + lane // 4
    return row, fragment // 2 % 2 * 32 + lane % 4 * 8 + fragment % 2 * 4 + element // 4 * 2 + element % 2


def lane_by_lane(words: torch.Tensor, counts: torch.Tensor, padding: int | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What 32 lanes load, 4 words each, that then store one after the other: (words, offsets (tiles + 1,) int32).

    ``words`` come tile by tile, ``counts`` of them. A tile's are filled up to a multiple of 4 by ``padding``, or by
    repeating the last one; offsets are in units of 4. Raises ValueError where int32 offsets do not reach.
    """
    chunks = -(-counts // CHUNK)
    offsets = torch.nn.functional.pad(chunks.cumsum(dim=0), (1, 0))
    if int(offsets[-1]) >= 2**31:
        raise ValueError(f"int32 offsets hold at most {CHUNK * (2**31 - 1):,} entries with their padding")
    tile = torch.repeat_interleave(torch.arange(len(counts), device=words.device), CHUNK * chunks)
    i = within(CHUNK * chunks)
    padded = words[(counts.cumsum(dim=0) - counts)[tile] + torch.minimum(i, counts[tile] - 1)]
    if padding is not None:
        padded = torch.where(i < counts[tile], padded, padding)
    warp, i = i // (CHUNK * LANES), i % (CHUNK * LANES)
    lanes = (chunks[tile] - warp * LANES).clamp(max=LANES)
    laid = torch.empty_like(padded)
    laid[CHUNK * (offsets[tile] + warp * LANES + i % lanes) + i // lanes] = padded
    return laid, offsets.int()


def within(counts: torch.Tensor) -> torch.Tensor:
    """0 to counts[0] - 1, 0 to counts[1] - 1, and so on, one after the other."""
    first = counts.cumsum(dim=0) - counts
    return torch.arange(int(counts.sum()), device=counts.device) - first.repeat_interleave(counts)


@dataclass(frozen=True)
class Division:
    """``batch`` rows of x and a row of tiles a block, whose ``warps`` divide K."""

    batch: int
    warps: int

    def __post_init__(self):
        """Raise ValueError for what no kernel has."""
        if (self.batch, self.warps) not in _COST:
            raise ValueError(f"not a division of few rows: {self}")

    def share(self, k: int) -> int:
        """Tiles along K of a warp."""
        return -(-grid((0, k))[1] // self.warps)

    @property
    def shared(self) -> int:
        """Dynamic shared memory of a block, in bytes: a tile a warp; in the end, a warp's sums."""
        return self.warps * max(_TILE, 4 * (self.batch * (ROWS + 4) + LANES))

    def blocks(self, m: int, n: int) -> int:
        """Blocks of a product."""
        return grid((n, 0))[0] * -(-m // self.batch)

    def fits(self, k: int, shared_limit: int) -> bool:
        """Whether a block has the shared memory that this takes, and a warp lanes enough for its tiles."""
        return self.share(k) <= _MOST_TILES and self.shared <= shared_limit


@functools.lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, divisions: tuple[Division, ...], processors: int, shared_limit: int
) -> Division | None:
    """The division that takes the fewest waves of blocks, each at its cost; None where none fits."""
    fitting = [each for each in divisions if each.fits(k, shared_limit)]

    def cost(each: Division) -> float:
        at_once = processors * max(1, _RESIDENT // each.warps)
        return -(-each.blocks(m, n) // at_once) * _COST[each.batch, each.warps]

    return min(fitting, key=cost, default=None)


def aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows that start on 16 bytes and go on with zeros up to a multiple of 8: itself, or a copy."""
    m, k = x.shape
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= k and k % 8 == 0:
        return x
    wide = x.new_zeros((m, -(-k // 8) * 8))[:, :k]
    return wide.copy_(x)
