"""The host side of ``gemm_sm80.cu``: which operands it takes, which tile suits a shape, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch

SOURCE = "gemm_sm80.cu"
_DTYPES = (torch.float16, torch.bfloat16)
_BOOL = ("false", "true")
_CHUNK = 8  # elements in the 16 bytes that one copy moves
GROUP_ROWS = 2048  # rows of y that blocks running together cover: 132 tiles of 128 x 256 are then about square
_SUM_BLOCK = 256


@dataclass(frozen=True)
class Config:
    """A tile of ``sm80_tile.cuh``: ``bm x bn`` of y a block, ``wm x wn`` a warp, ``stages`` slices of ``bk`` in flight.

    ``size`` is that of an element in bytes, ``speed`` the rate of a multiprocessor full of such blocks, relative to
    the fastest tile's.
    """

    bm: int
    bn: int
    bk: int
    wm: int
    wn: int
    stages: int
    speed: float = 1.0
    size: int = 2

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        if self.bm % self.wm or self.bn % self.wn:
            raise ValueError(f"warp tiles must divide the tile: {self}")
        depth = self.bk * self.size
        if self.wm % 16 or self.wn % 32 or max(self.wm, self.wn) > 64 or depth not in (64, 128) or self.stages < 3:
            raise ValueError(f"not a shape that sm80_tile.cuh has: {self}")
        if self.epilogue > self.shared:
            raise ValueError(f"y does not fit the stages' memory: {self}")

    @property
    def warps(self) -> int:
        """Warps a block."""
        return self.bm // self.wm * (self.bn // self.wn)

    @property
    def shared(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        return self.stages * (self.bm + self.bn) * self.bk * self.size

    @property
    def epilogue(self) -> int:
        """Bytes of shared memory that the epilogue needs, of those that the slices leave."""
        return self.bm * self.bn * 2

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) product."""
        return -(-m // self.bm) * -(-n // self.bn)

    def instance(self, dtype: torch.dtype, x_k_major: bool, w_k_major: bool) -> str:
        """The C++ name of the kernel."""
        return f"gemm_sm80<{C_FLOATS[dtype]}, {_BOOL[x_k_major]}, {_BOOL[w_k_major]}, {self.sizes}>"

    @property
    def sizes(self) -> str:
        """The template arguments that they all have."""
        return f"{self.bm}, {self.bn}, {self.bk}, {self.wm}, {self.wn}, {self.stages}"


# Speeds are estimates, not yet measured.
CONFIGS = (
    Config(128, 256, 64, 64, 64, 3, speed=1.0),  # 144 KB: 8.0, 9.0, 10.0
    Config(128, 256, 32, 64, 64, 4, speed=0.97),  # 96 KB: the same tile for 8.6, 8.9, 12.0
    Config(128, 128, 32, 64, 64, 3, speed=0.9),  # 48 KB: two blocks a multiprocessor everywhere
    Config(64, 64, 64, 32, 32, 3, speed=0.6),  # 48 KB
)
SPLITS = (1, 2, 4, 8, 16)
INSTANCES = (
    *(c.instance(dtype, x, w) for c in CONFIGS for dtype in _DTYPES for x in (True, False) for w in (True, False)),
    *(f"gemm_sm80_sum<{C_FLOATS[dtype]}>" for dtype in _DTYPES),
)


def supports(x: torch.Tensor, x_k_major: bool, ldx: int, w: torch.Tensor, w_k_major: bool, ldw: int) -> bool:
    """Whether the kernel can read these operands, given as :func:`launch_gemm` takes them.

    It copies 16-bit values in aligned chunks of 16 bytes. So K must be a multiple of 8 for a K-major operand, the
    number of rows for a transposed one, and the addresses, ``ldx`` and ``ldw`` multiples of 8 elements. The device
    must be of compute capability 8.0 or newer.
    """
    (m, k), n = x.shape, w.shape[0]
    return (
        x.dtype in _DTYPES
        and ldx % _CHUNK == ldw % _CHUNK == 0
        and (k if x_k_major else m) % _CHUNK == 0
        and (k if w_k_major else n) % _CHUNK == 0
        and x.data_ptr() % 16 == w.data_ptr() % 16 == 0
        and max(m, n, k) < 2**31 - 512  # the kernel counts rows and columns in 32 bits, tiles rounded up
        and CONFIGS[-1].tiles(m, n) * SPLITS[-1] < 2**31
    )


def launch_gemm(
    x: torch.Tensor,
    x_k_major: bool,
    ldx: int,
    w: torch.Tensor,
    w_k_major: bool,
    ldw: int,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    relu: bool,
    alpha: float = 1.0,
    config: Config | None = None,
    split: int | None = None,
    group: int | None = None,
) -> None:
    """Launch ``y = act(alpha * x @ w.T + bias)`` on the device of ``x``; see :func:`supports`.

    Parameters
    ----------
    x, w : (M, K) and (N, K), float16 or bfloat16, both the same
    x_k_major, w_k_major : bool
        Whether that operand's rows are contiguous; otherwise its columns are.
    ldx, ldw : int
        Stride of the other dimension, in elements.
    bias : (N,) contiguous, dtype of ``x``, or None
    y : (M, N) row-major, dtype of ``x``
        Written whole.
    config, split, group
        The tile, the number of blocks that share a tile and divide K, and how many rows of tiles run together;
        chosen by shape and device where None.

    Sums are held in float32, in an order that depends on the tile and ``split`` only, and rounded once.
    """
    (m, k), n = x.shape, w.shape[0]
    if config is None:
        config, best_split = choose(m, n, k, *limits(x.device.index))
        split = split or best_split
    split = split or 1
    sums = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    sums_address, bias_address = (0 if a is None else a.data_ptr() for a in (sums, bias))
    operands = (x.data_ptr(), ldx, w.data_ptr(), ldw, bias_address, y.data_ptr(), sums_address)
    launch(
        x.device,
        SOURCE,
        config.instance(x.dtype, x_k_major, w_k_major),
        "PqPqPPPiiifiii",
        (*operands, m, n, k, alpha, relu, group or max(1, GROUP_ROWS // config.bm), split),
        grid=config.tiles(m, n) * split,
        block=32 * config.warps,
        shared=config.shared,
    )
    if sums is not None:
        launch(
            x.device,
            SOURCE,
            f"gemm_sm80_sum<{C_FLOATS[x.dtype]}>",
            "PPPqifii",
            (sums_address, bias_address, y.data_ptr(), m, n, alpha, relu, split),
            grid=-(-m * n // _SUM_BLOCK),
            block=_SUM_BLOCK,
        )


@functools.cache
def limits(device: int) -> tuple[int, int]:
    """Multiprocessors, and bytes of shared memory that a block may have."""
    properties = torch.cuda.get_device_properties(device)
    return properties.multi_processor_count, properties.shared_memory_per_block_optin


@functools.lru_cache(maxsize=4096)
def choose(
    m: int,
    n: int,
    k: int,
    multiprocessors: int,
    shared_limit: int,
    configs: tuple[Config, ...] = CONFIGS,
    rate: float = 1500.0,
) -> tuple[Config, int]:
    """The tile and the split of K with the least time by a rough model of one multiprocessor; only the order counts.

    A multiprocessor does ``rate`` multiply-adds a nanosecond when two blocks of four warps, or one of eight, keep it
    busy, and about 0.6 of that otherwise; a round of blocks costs its start and its stores besides, and a split the
    second kernel.
    """
    ROUND, SUM, BANDWIDTH = 1000.0, 2500.0, 2000.0  # ns, ns, bytes/ns

    def time(candidate: tuple[Config, int]) -> float:
        config, split = candidate
        blocks = math.ceil(config.tiles(m, n) * split / multiprocessors)
        busy = rate * config.speed * (1.0 if blocks * config.warps >= 8 else 0.6)
        depth = math.ceil(k / config.bk / split) * config.bk
        second = SUM + 8 * split * m * n / BANDWIDTH if split > 1 else 0.0
        return blocks * config.bm * config.bn * depth / busy + math.ceil(blocks * config.warps / 8) * ROUND + second

    fitting = [config for config in configs if config.shared <= shared_limit]
    depths = [split for split in SPLITS if split == 1 or k >= 128 * split]
    return min(((config, split) for config in fitting for split in depths), key=time)
