"""The host side of ``spmm_csr_few_sm80.cu``: few rows of x of halves, and a pattern of W that was looked at before.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import torch

from qsparse.kernels import _spmm_whole_sm90
from qsparse.kernels import _weight_tiles_sm80 as tiles
from qsparse.kernels._face import C_FLOATS, matrix
from qsparse.kernels._gemm_sm80 import limits
from qsparse.kernels._load import launch

SOURCE = "spmm_csr_few_sm80.cu"
DTYPES = (torch.float16, torch.bfloat16)
DIVISIONS = tuple(tiles.Division(batch, warps) for batch, warps in ((8, 16), (16, 16), (32, 16), (32, 8)))
_LEAST_ENTRIES = 16  # of a tile in the mean: with fewer the shifts of its rows, 128 bytes, are too much beside them
_DENSEST_WAVES = 0.15  # density with which blocks may come in several waves
_SPARSEST = 0.055  # below it a Hopper card's kernels that go entry by entry are faster than waves, and for 8 rows
_MOST_ENTRIES = 2**25  # that a pattern is found of: it takes some 100 bytes an entry meanwhile


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    shapes = [f"{each.batch}, {each.warps}" for each in DIVISIONS]
    return tuple(f"spmm_csr_few<{C_FLOATS[dtype]}, {shape}>" for dtype in DTYPES for shape in shapes)


class Pattern:
    """Where the entries of W (N, K) in CSR go in tiles.

        places  (4 starts[-1],) int16: of each entry, in the order of `starts`, where in its tile it belongs, in bytes;
                above these 12 bits its row, modulo 16; 1 for none, which fills up a tile's last four. A tile's rows
                come in the order of `_turn`, and within a row entries as CSR has them
        starts  (tiles + 1,) int32: where a tile's entries begin, in units of 4
        shifts  (tiles, 32) int32: entry i of a tile has the value i + shift of its row, which is number
                2 (r % 16) + r / 16 here

    That is 2 bytes an entry and 128 a tile.
    """

    def __init__(self, rows, cols, shape: tuple[int, int]):
        """Of the row and the column of each entry, int64, ascending."""
        tall, wide = tiles.grid(shape)
        tile, row = rows // tiles.ROWS * wide + cols // tiles.COLUMNS, rows % tiles.ROWS
        order = torch.argsort(tile * tiles.ROWS + _turn(row), stable=True)
        tile, row, column = tile[order], row[order], cols[order] % tiles.COLUMNS
        counts = torch.bincount(tile, minlength=tall * wide)
        places, self.starts = tiles.lane_by_lane(tiles.place(row, column) | row % 16 << 12, counts, padding=1)
        self.places = (places - (places >> 15 << 16)).short()
        self.shifts = torch.zeros((tall * wide, tiles.ROWS), dtype=torch.int32, device=cols.device)
        self.shifts[tile, row % 16 * 2 + row // 16] = (order - tiles.within(counts)).int()


def _turn(row: torch.Tensor) -> torch.Tensor:
    """The place of a tile's row among those whose entries follow each other: neighbours lie in different banks."""
    return row % 8 // 2 * 8 + row // 16 * 4 + row // 8 % 2 * 2 + row % 2


def pattern(cols, row_offsets, shape: tuple[int, int]) -> Pattern | None:
    """The tiles of a pattern in CSR; None unless its rows ascend, and where its entries are too few or too many."""
    (n, k), nnz = shape, cols.numel()
    if not nnz or not _LEAST_ENTRIES * n * k / tiles.PLACES <= nnz <= _MOST_ENTRIES:
        return None
    rows = torch.repeat_interleave(torch.arange(n, device=cols.device), row_offsets.long().diff())
    cols = cols.long()
    if bool(((rows[1:] == rows[:-1]) & (cols[1:] <= cols[:-1])).any()):
        return None
    return Pattern(rows, cols, shape)


def kept(plan) -> Pattern | None:
    """The tiles of a plan's pattern, found when they are first wanted, which waits for the GPU; None if it has none.

    While a CUDA graph captures nothing is found: call once before.
    """
    if plan.few is None and not torch.cuda.is_current_stream_capturing():
        plan.few = pattern(plan.cols, plan.row_offsets, (plan.n, plan.k)) or False
        torch.cuda.current_stream(plan.cols.device).synchronize()  # it is there for every stream
    return plan.few or None


def choose(x, n: int, nnz: int) -> tiles.Division | None:
    """How a product of few rows is divided; None where this is not for it, or others take less time."""
    m, k = x.shape
    if x.dtype not in DTYPES or not 0 < m <= tiles.FEW_ROWS or max(n, k) >= 2**30:
        return None
    processors, shared_limit = limits(x.device.index)
    division = tiles.choose(m, n, k, DIVISIONS, processors, shared_limit)
    if division is None:
        return None
    waves = division.blocks(m, n) > processors
    if waves and nnz > _DENSEST_WAVES * n * k:
        return None
    sparse = nnz < _SPARSEST * n * k and torch.cuda.get_device_capability(x.device) == (9, 0)
    if sparse and (waves or (m <= 8 and _spmm_whole_sm90.takes(x))):
        return None
    return division


def spmm(division: tiles.Division, x, values, cols, row_offsets, bias, n: int, relu: bool, found: Pattern):
    """``act(x @ W.T + bias)``, row-major."""
    m, k = x.shape
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    x = tiles.aligned(matrix(x, k_major=True)[0])
    arrays = (values, cols, row_offsets, found.places, found.starts, found.shifts)
    addresses = (*(a.data_ptr() for a in arrays), 0 if bias is None else bias.data_ptr(), y.data_ptr())
    sizes = (m, n, k, cols.dtype == torch.uint16, relu, tiles.grid((n, k))[0], division.share(k))
    launch(
        x.device,
        SOURCE,
        f"spmm_csr_few<{C_FLOATS[x.dtype]}, {division.batch}, {division.warps}>",
        "PqPPPPPPPPiiiiiii",
        (x.data_ptr(), x.stride(0), *addresses, *sizes),
        grid=division.blocks(m, n),
        block=32 * division.warps,
        shared=division.shared,
    )
    return y
