"""The host side of ``spmm_entries_sm90.cu``: products on Hopper of some dozens of rows and a W that is large.

The face of the operation is :mod:`qsparse.kernels.spmm_entries`.
"""

from __future__ import annotations

import itertools

import torch

from qsparse.kernels import _weight_tiles_sm80 as tiles
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import prepare, tensor_map
from qsparse.kernels._spmm_entries_sm80 import DTYPES

SOURCE = "spmm_entries_sm90.cu"
SPLITS = (1, 2)  # blocks that divide K; clusters of two fit any Hopper card whole
INSTANCES = tuple(
    f"spmm_entries_sm90<{C_FLOATS[dtype]}, {C_FLOATS[out]}, {split}>"
    for dtype, split in itertools.product(DTYPES, SPLITS)
    for out in (dtype, torch.float32)
)
# With fewer rows of x, or a smaller product, that kernel is faster on an H200 whose warps need not wait for each other.
_FEWEST_ROWS, _SMALLEST = 33, 64 * 4096**2
_ROWS, _PARTS, _ROOMS, _THREADS = 64, 8, 2, 256 + 17 * 32
_PANEL = 64 * tiles.COLUMNS * 2  # bytes of two tiles, or of x for a part
SHARED = _PARTS * (_ROOMS + 1) * _PANEL + 2 * 4 * _ROWS**2 + 1024  # 1,024 to align


def _blocks(m: int, n: int) -> int:
    return -(-n // _ROWS) * -(-m // _ROWS)


def share(k: int, split: int) -> int:
    """Tiles along K of a part."""
    return -(-tiles.grid((0, k))[1] // (_PARTS * split))


def choose(m: int, n: int, k: int, processors: int) -> int | None:
    """How many blocks divide K; None where others are faster, or K is longer than what this takes."""
    fitting = [split for split in SPLITS if share(k, split) < tiles.LANES]
    if not _FEWEST_ROWS <= m <= tiles.FEW_ROWS or m * n * k < _SMALLEST or n >= 2**30 or not fitting:
        return None
    if 3 * max(SPLITS) * _blocks(m, n) < 2 * processors:  # too few blocks for the chip
        return None
    return min(fitting, key=lambda split: -(-_blocks(m, n) * split // processors) * share(k, split))


def launch_some(split: int, x, entries, offsets, bias, y, relu: bool) -> None:
    """``y = act(x @ W.T + bias)`` into ``y`` (M, N) row-major, dtype of ``x`` or float32.

    ``x`` (M, K) has contiguous rows; the other arrays are contiguous, ``entries`` on 16 bytes.
    """
    (m, k), n = x.shape, y.shape[1]
    x = tiles.aligned(x)
    box = min(_ROWS, -(-m // 8) * 8)
    x_map = tensor_map(x.data_ptr(), x.dtype, m, k, x.stride(0), (box, tiles.COLUMNS))
    bias_address = 0 if bias is None else bias.data_ptr()
    instance = f"spmm_entries_sm90<{C_FLOATS[x.dtype]}, {C_FLOATS[y.dtype]}, {split}>"
    grid = _blocks(m, n) * split
    run = prepare(x.device.index, SOURCE, instance, "128siPPPPiiiiii", grid, _THREADS, SHARED, cluster=split)
    operands = (x_map, box, entries.data_ptr(), offsets.data_ptr(), bias_address, y.data_ptr())
    run((*operands, m, n, k, relu, tiles.grid((n, k))[0], share(k, split)))
