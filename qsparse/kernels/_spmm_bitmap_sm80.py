"""The host side of ``spmm_bitmap_sm80.cu``: how a product is divided, and the launches.

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
from qsparse.kernels._load import launch

SOURCE = "spmm_bitmap_sm80.cu"
FEW_ROWS = 64  # of x: with more of them a dense matrix, made once, is the faster way
DTYPES = (torch.float16, torch.bfloat16)
_BATCHES = (8, 16, 32, 64)
_WARPS = (16, 8, 4)
_SEGMENTS = (1, 2, 4, 8, 16)
_SPLITS = tuple(range(1, 17))
_MOST_AHEAD = 24 * 2**20  # bytes that may be sent to L2 at once: they must still be there when they are read
_MOST_ROWS = 512  # of x, by warps: sums that the registers hold
_MOST_TILES = 31  # along K that a warp may have
_BUFFER = 257 * 32  # bytes of shared memory a warp
_SUM_BLOCK = 256
_WRITE_WARPS, _WRITE_BLOCKS = 8, 3  # warps of a block that writes W out, and such blocks of a multiprocessor


def _instances(op: str, batches: bool = True) -> tuple[str, ...]:
    pairs = [(dtype, out) for dtype in DTYPES for out in (dtype, torch.float32)]
    ends = [f", {batch}>" for batch in _BATCHES] if batches else [">"]
    return tuple(f"{op}<{C_FLOATS[dtype]}, {C_FLOATS[out]}{end}" for dtype, out in pairs for end in ends)


INSTANCES = (
    *_instances("spmm_bitmap_sm80"),
    *_instances("spmm_bitmap_sum", batches=False),
    *(f"spmm_bitmap_write<{C_FLOATS[dtype]}>" for dtype in DTYPES),
)


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
        if (
            not known
            or self.segments not in _SEGMENTS
            or self.warps % self.segments
            or self.batch * self.warps > _MOST_ROWS
        ):
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


def takes_few(x: torch.Tensor, n: int) -> bool:
    """Whether the kernel for few rows takes this product: halves, nothing empty, and K that fits shared memory."""
    m, k = x.shape
    if x.dtype not in DTYPES or m > FEW_ROWS or min(m, n, k) == 0 or max(n, k) >= 2**30:
        return False
    return choose(m, n, k, *limits(x.device.index)) is not None


def launch_few(
    x, values, masks, offsets, bias, y, *, relu: bool, config: Config | None = None, ahead: bool | None = None
) -> None:
    """``y = act(x @ W.T + bias)`` into ``y`` (M, N) row-major, dtype of ``x`` or float32.

    ``x`` (M, K) has contiguous rows; the other arrays are contiguous, ``values`` and ``masks`` on 16 bytes. ``config``,
    and whether all of W is sent to L2 ``ahead``, are chosen where None.
    """
    (m, k), n = x.shape, y.shape[1]
    config = config or choose(m, n, k, *limits(x.device.index))
    if ahead is None:
        ahead = values.numel() * values.element_size() + masks.numel() * masks.element_size() <= _MOST_AHEAD
    x, split = _aligned(x), config.split
    sums = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    bias_address, sums_address = (0 if a is None else a.data_ptr() for a in (bias, sums))
    operands = (x.data_ptr(), x.stride(0), values.data_ptr(), masks.data_ptr(), offsets.data_ptr())
    sizes = (m, n, k, relu, config.share(k), config.segments, split, values.numel() // 8 if ahead else 0)
    types = f"{C_FLOATS[x.dtype]}, {C_FLOATS[y.dtype]}"
    launch(
        x.device,
        SOURCE,
        f"spmm_bitmap_sm80<{types}, {config.batch}>",
        "PqPPPPPPiiiiiiii",
        (*operands, bias_address, y.data_ptr(), sums_address, *sizes),
        grid=config.blocks(m, n),
        block=32 * config.warps,
        shared=config.shared(k),
    )
    if sums is not None:
        launch(
            x.device,
            SOURCE,
            f"spmm_bitmap_sum<{types}>",
            "PPPqiii",
            (sums_address, bias_address, y.data_ptr(), m, n, relu, split),
            grid=-(-m * n // _SUM_BLOCK),
            block=_SUM_BLOCK,
        )


def launch_write(values, masks, offsets, dense: torch.Tensor, k: int) -> None:
    """Write W (N, K) into ``dense`` (N, ld), float16 or bfloat16, ld a multiple of 8; zeros beyond K."""
    n, ld = dense.shape
    tiles = offsets.numel() - 1
    processors, shared_limit = limits(values.device.index)
    shared = _WRITE_WARPS * _BUFFER
    warps = processors * min(_WRITE_BLOCKS, shared_limit // shared) * _WRITE_WARPS
    share = max(1, min(-(-tiles // warps), _MOST_TILES))
    launch(
        values.device,
        SOURCE,
        f"spmm_bitmap_write<{C_FLOATS[values.dtype]}>",
        "PPPPqiii",
        (values.data_ptr(), masks.data_ptr(), offsets.data_ptr(), dense.data_ptr(), ld, n, k, share),
        grid=-(-tiles // (share * _WRITE_WARPS)),
        block=32 * _WRITE_WARPS,
        shared=shared,
    )


def _aligned(x: torch.Tensor) -> torch.Tensor:
    """``x`` with rows that start on 16 bytes: itself, or a copy."""
    if x.data_ptr() % 16 == 0 and x.stride(1) == 1 and x.stride(0) % 8 == 0 and x.stride(0) >= x.shape[1]:
        return x
    wide = x.new_empty((x.shape[0], -(-x.shape[1] // 8) * 8))[:, : x.shape[1]]
    return wide.copy_(x)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, processors: int, shared_limit: int) -> Config | None:
    """The division with the least time by a rough model of a multiprocessor; None where none fits.

    Only the order counts. In microseconds: every wave of blocks waits for memory at its beginning; a tile costs its
    warp some, and more with more warps and rows of x; x arrives at so many bytes; sums of several blocks are a second
    launch. On an H200 that puts the divisions that were measured in their order.
    """
    WAVE, TILE, WARP, ROW, BYTES, SECOND, RESIDENT = 3.3, 0.5, 0.031, 0.0019, 50e3, 2.2, 16

    def time(config: Config) -> float:
        blocks, share = -(-config.blocks(m, n) // processors), config.share(k)
        resident = min(blocks, shared_limit // config.shared(k), RESIDENT // config.warps)
        tile = TILE + resident * config.warps * (WARP + ROW * (config.batch - 8))
        x = blocks * config.batch * config.segments * share * _bitmap_tiles.COLUMNS * 2 / BYTES
        return -(-blocks // resident) * (WAVE + share * tile) + x + (SECOND if config.split > 1 else 0.0)

    batches = [batch for batch in _BATCHES if batch < 2 * m] or _BATCHES[:1]
    wide = _bitmap_tiles.grid((0, k))[1]
    possible = (
        Config(batch, warps, segments, split)
        for batch, warps, segments, split in itertools.product(batches, _WARPS, _SEGMENTS, _SPLITS)
        if warps % segments == 0 and batch * warps <= _MOST_ROWS and segments * split <= wide
    )
    fitting = [c for c in possible if c.share(k) <= _MOST_TILES and c.shared(k) <= shared_limit]
    return min(fitting, key=time, default=None)
