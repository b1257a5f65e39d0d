"""The host side of ``spmm_bitmap_sm90.cu`` and ``spmm_bitmap_sm80.cu``: how a product is divided, and the launches.

The face of the operation is :mod:`qsparse.kernels.spmm_bitmap`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools
import itertools
from dataclasses import dataclass

import torch

from qsparse.kernels import _bitmap_tiles
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._gemm_sm80 import limits
from qsparse.kernels._load import launch, prepare

SM80, SM90 = "spmm_bitmap_sm80.cu", "spmm_bitmap_sm90.cu"
FEW_ROWS = 64  # of x: with more of them a dense matrix, made once, is the faster way
_DTYPES = (torch.float16, torch.bfloat16)
_BATCHES = (8, 16, 32, 64)
_WARPS = (16, 8, 4)
_SEGMENTS = (1, 2, 4, 8, 16)
_SPLITS = tuple(range(1, 9))  # blocks of a cluster
_MOST_TILES = 31  # along K that a warp may have
_BUFFER = 257 * 32  # bytes of shared memory a warp
_SUM_BLOCK = 256


def _instances(op: str, batches: bool = True) -> tuple[str, ...]:
    pairs = [(dtype, out) for dtype in _DTYPES for out in (dtype, torch.float32)]
    ends = [f", {batch}>" for batch in _BATCHES] if batches else [">"]
    return tuple(f"{op}<{C_FLOATS[dtype]}, {C_FLOATS[out]}{end}" for dtype, out in pairs for end in ends)


SOURCES = {
    SM80: (*_instances("spmm_bitmap_sm80"), *_instances("spmm_bitmap_sum", batches=False)),
    SM90: _instances("spmm_bitmap_sm90"),
}


@dataclass(frozen=True)
class Config:
    """Up to ``batch`` rows of x and ``warps`` a block; ``segments`` of its warps, and ``split`` blocks, divide K."""

    batch: int
    warps: int
    segments: int
    split: int

    def __post_init__(self):
        """Raise ValueError for what the kernels do not have."""
        known = self.batch in _BATCHES and self.warps in _WARPS and self.split in _SPLITS
        if not known or self.segments not in _SEGMENTS or self.warps % self.segments or self.batch * self.warps > 512:
            raise ValueError(f"not a division that spmm_bitmap has: {self}")

    def share(self, k: int) -> int:
        """Tiles along K of a warp."""
        return -(-_bitmap_tiles.grid((0, k))[1] // (self.segments * self.split))

    def shared(self, k: int) -> int:
        """Dynamic shared memory of a block, in bytes: its part of x, and a buffer a warp; in the end, a warp's sums."""
        pitch = self.segments * self.share(k) * _bitmap_tiles.COLUMNS * 2 + 64
        sums = 4 * self.batch * (_bitmap_tiles.ROWS * self.warps + 4 * self.segments)
        return max(self.batch * pitch + self.warps * _BUFFER, sums)

    def blocks(self, m: int, n: int) -> int:
        """Blocks of a product."""
        width = _bitmap_tiles.ROWS * self.warps // self.segments
        return -(-n // width) * -(-m // self.batch) * self.split


def supports(x: torch.Tensor, n: int) -> bool:
    """Whether the kernels take this product: halves, nothing empty, and K that fits their shared memory."""
    m, k = x.shape
    if x.dtype not in _DTYPES or min(m, n, k) == 0 or max(n, k) >= 2**30 or m * n >= 2**34:
        return False
    return choose(m, n, k, *limits(x.device.index)) is not None


def launch_few(tier: str, x, values, masks, offsets, bias, y, *, relu: bool, config: Config | None = None) -> None:
    """``y = act(x @ W.T + bias)`` into ``y`` (M, N) row-major, dtype of ``x`` or float32, by the tier's kernel.

    ``x`` (M, K) has contiguous rows; the other arrays are contiguous.
    """
    (m, k), n = x.shape, y.shape[1]
    config = config or choose(m, n, k, *limits(x.device.index))
    x = _aligned(x)
    split = config.split
    addresses = (
        *(a.data_ptr() for a in (values, masks, offsets)),
        0 if bias is None else bias.data_ptr(),
        y.data_ptr(),
    )
    sizes = (m, n, k, relu, config.share(k), config.segments, split)
    types = f"{C_FLOATS[x.dtype]}, {C_FLOATS[y.dtype]}"
    instance = f"{{}}<{types}, {config.batch}>"
    grid = (config.blocks(m, n), 32 * config.warps, config.shared(k))
    if tier == "sm90":
        run = prepare(x.device.index, SM90, instance.format("spmm_bitmap_sm90"), "PqPPPPPiiiiiii", *grid, cluster=split)
        run((x.data_ptr(), x.stride(0), *addresses, *sizes))
        return
    sums = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    sums_address = 0 if sums is None else sums.data_ptr()
    run = prepare(x.device.index, SM80, instance.format("spmm_bitmap_sm80"), "PqPPPPPPiiiiiii", *grid)
    run((x.data_ptr(), x.stride(0), *addresses, sums_address, *sizes))
    if sums is not None:
        arguments = (sums_address, *addresses[3:], m, n, relu, split)
        blocks = -(-m * n // _SUM_BLOCK)
        launch(x.device, SM80, f"spmm_bitmap_sum<{types}>", "PPPqiii", arguments, grid=blocks, block=_SUM_BLOCK)


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows that start on 16 bytes: itself, or a copy."""
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1]:
        return x
    wide = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
    return wide.copy_(x)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, processors: int, shared_limit: int) -> Config | None:
    """The division with the least time by a rough model of one multiprocessor; None where none fits.

    A tile costs so many clocks, more where a warp is alone; x costs its bytes, and blocks that share K a cluster.
    """
    ALONE, TILE, EIGHT, CLUSTER = (
        1200.0,
        75.0,
        5.0,
        3000.0,
    )  # clocks: a lone warp's tile, one of many, 8 rows, to add up
    BYTES = 40.0  # of x, a clock

    def time(config: Config) -> float:
        share, blocks = config.share(k), -(-config.blocks(m, n) // processors)
        waves = -(-blocks // (shared_limit // config.shared(k)))
        tiles = max(blocks * config.warps * (TILE + EIGHT * config.batch / 8), waves * ALONE) * share
        x = blocks * config.batch * config.segments * share * _bitmap_tiles.COLUMNS * 2 / BYTES
        return tiles + x + (CLUSTER if config.split > 1 else 0.0)

    batches = [batch for batch in _BATCHES if batch < 2 * m] or _BATCHES[:1]
    wide = _bitmap_tiles.grid((0, k))[1]
    every = itertools.product(batches, _WARPS, _SEGMENTS, _SPLITS)
    possible = (
        Config(*sizes)
        for sizes in every
        if sizes[1] % sizes[2] == 0 and sizes[0] * sizes[1] <= 512 and sizes[2] * sizes[3] <= wide
    )
    fitting = [c for c in possible if c.share(k) <= _MOST_TILES and c.shared(k) <= shared_limit]
    return min(fitting, key=time, default=None)
