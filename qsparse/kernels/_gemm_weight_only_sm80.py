"""The host side of ``gemm_weight_only_sm80.cu``: which operands it takes, which tile suits a shape, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm_weight_only`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import following, launch

SOURCE = "gemm_weight_only_sm80.cu"
_DTYPES = (torch.float16, torch.bfloat16)
_BLOCK = 32  # columns that a warp multiplies at a time: groups of columns are multiples of it
_UNIT = 4 * _BLOCK  # columns of a slice that a warp has are multiples of it
_SUM_BLOCK = 256
_SPLITS = 16
_PRODUCT = struct.Struct("@PqiPqiPiiIPPiiiii0P")  # the kernel's first parameter, ``Product`` in C++


@dataclass(frozen=True)
class Config:
    """A tile of ``gemm_weight_only_sm80.cu``: ``bm`` rows of x by ``wn * tiles * 16`` outputs a block.

    ``stages`` slices of ``row`` bytes of each of the tile's weight rows are in flight or in use; ``wn * wk`` warps
    divide a slice, ``wk`` of them along K.
    """

    bits: int
    bm: int
    wn: int
    tiles: int
    wk: int
    row: int
    stages: int

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        if self.bits not in (4, 8) or self.bm % 8 or self.stages < 2 or self.bk % (self.wk * _UNIT):
            raise ValueError(f"not a shape that {SOURCE} has: {self}")
        for rows, chunks, turn in ((self.bn, self.row // 16, 32 // self.bits), (self.bm, self.bk // 8, 2)):
            step = self.threads // chunks
            if self.threads % chunks or (rows > step and (rows % step or step % turn)):
                raise ValueError(f"the threads must share a slice evenly: {self}")
        if self.wk * self.bm * (self.bn + 4) * 4 > self.shared:
            raise ValueError(f"the sums do not fit the stages' memory: {self}")

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * self.wn * self.wk

    @property
    def bn(self) -> int:
        """Outputs a block."""
        return self.wn * self.tiles * 16

    @property
    def bk(self) -> int:
        """Columns a slice."""
        return self.row * 8 // self.bits

    @property
    def slice_bytes(self) -> int:
        """Bytes of weights in a slice."""
        return self.bn * self.row

    @property
    def shared(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        scales = self.bn * (self.bk // _UNIT) * 4
        return self.stages * (self.slice_bytes + self.bm * self.bk * 2 + scales)

    def tiles_of(self, m: int, n: int) -> int:
        """Tiles of an (m, n) product."""
        return -(-m // self.bm) * -(-n // self.bn)

    def instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel."""
        sizes = f"{self.bits}, {self.bm}, {self.wn}, {self.tiles}, {self.wk}, {self.row}, {self.stages}"
        return f"gemm_weight_only_sm80<{C_FLOATS[dtype]}, {sizes}>"


CONFIGS = (
    Config(8, 8, 4, 2, 2, 256, 3),  # 111 KB: 8.0, 9.0, 10.0
    Config(8, 8, 2, 2, 4, 512, 3),  # 123 KB
    Config(4, 8, 4, 2, 2, 256, 2),  # 84 KB
    Config(4, 8, 2, 2, 4, 512, 2),  # 100 KB: 8.0, 9.0, 10.0
    Config(8, 16, 4, 2, 2, 256, 2),  # 82 KB
    Config(8, 16, 2, 2, 4, 512, 4),  # 196 KB: 9.0, 10.0
    Config(4, 16, 4, 2, 2, 128, 3),  # 75 KB
    Config(8, 32, 4, 2, 1, 128, 4),  # 98 KB
    Config(4, 32, 4, 2, 1, 128, 3),  # 99 KB
    Config(8, 64, 4, 2, 2, 256, 3),  # 195 KB: 9.0, 10.0
    Config(4, 64, 4, 2, 2, 256, 2),  # 196 KB
)
INSTANCES = (
    *(config.instance(dtype) for config in CONFIGS for dtype in _DTYPES),
    *(f"gemm_weight_only_sum<{C_FLOATS[dtype]}>" for dtype in _DTYPES),
)


def supports(x: torch.Tensor, w: torch.Tensor, group: int | None) -> bool:
    """Whether the kernel can read these operands: any rows, but groups of whole blocks, and nothing empty."""
    (m, k), n = x.shape, w.shape[0]
    return (
        x.dtype in _DTYPES
        and (group is None or group % _BLOCK == 0)
        and min(m, n, k) > 0
        and max(m, n, 2 * k) < 2**31 - 512  # the kernel counts in 32 bits, in bytes along a row
        and m * n < 2**34
        and (group is None or (n * -(-k // group) < 2**32 and k // _BLOCK * (group // _BLOCK) < 2**32))
    )


def launch_gemm(
    x: torch.Tensor,
    ldx: int,
    w: torch.Tensor,
    ldw: int,
    scale: torch.Tensor,
    group: int | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    relu: bool,
    config: Config | None = None,
    split: int | None = None,
) -> None:
    """Launch ``y = act(x @ (scale * q).T + bias)`` on the device of ``x``; see :func:`supports`.

    Parameters
    ----------
    x : (M, K) float16 or bfloat16, contiguous rows ``ldx`` elements apart
    w : (N, K) int8 or (N, ceil(K / 2)) uint8, contiguous rows ``ldw`` bytes apart
    scale : (N,) or (N, ceil(K / group)) float32, row-major
    group : a multiple of 32, or None
    bias : (N,) contiguous, dtype of ``x``, or None
    y : (M, N) row-major, dtype of ``x``
        Written whole.
    config, split
        The tile, and the number of blocks that share a tile and divide K; chosen by shape and device where None.
    """
    (m, k), n = x.shape, w.shape[0]
    bits = 8 if w.dtype == torch.int8 else 4
    if config is None:
        config, best_split = choose(bits, m, n, k, *limits(x.device.index))
        split = split or best_split
    split = split or 1
    sums = torch.empty((split, m, n), dtype=torch.float32, device=x.device) if split > 1 else None
    sums_address = 0 if sums is None else sums.data_ptr()
    blocks, bias_address = (group or 0) // _BLOCK, 0 if bias is None else bias.data_ptr()
    product = _PRODUCT.pack(
        *(x.data_ptr(), ldx, _unit(x, 2 * ldx), w.data_ptr(), ldw, _unit(w, ldw), scale.data_ptr()),
        *(scale.shape[1] if blocks else 1, blocks, -(-(2**32) // blocks) if blocks > 1 else 0),
        *(bias_address, y.data_ptr(), m, n, k, relu, split),
    )
    launch(
        x.device,
        SOURCE,
        config.instance(x.dtype),
        f"{_PRODUCT.size}sP",
        (product, sums_address),
        grid=config.tiles_of(m, n) * split,
        block=config.threads,
        shared=config.shared,
    )
    if sums is not None:
        with following():
            launch(
                x.device,
                SOURCE,
                f"gemm_weight_only_sum<{C_FLOATS[x.dtype]}>",
                "PPPqiii",
                (sums_address, bias_address, y.data_ptr(), m, n, relu, split),
                grid=-(-m * n // _SUM_BLOCK),
                block=_SUM_BLOCK,
            )


def _unit(a: torch.Tensor, row_bytes: int) -> int:
    """The largest power of two up to 16 that divides the address of every row."""
    bits = a.data_ptr() | row_bytes | 16
    return bits & -bits


@functools.cache
def limits(device: int) -> tuple[int, int, int]:
    """Multiprocessors, and bytes of shared memory that a block and that a multiprocessor may have."""
    properties = torch.cuda.get_device_properties(device)
    per_block, per_multiprocessor = (
        properties.shared_memory_per_block_optin,
        properties.shared_memory_per_multiprocessor,
    )
    return properties.multi_processor_count, per_block, per_multiprocessor


@functools.lru_cache(maxsize=4096)
def choose(
    bits: int, m: int, n: int, k: int, multiprocessors: int, shared_limit: int, shared_total: int
) -> tuple[Config, int]:
    """The tile and the split of K with the least time by a rough model of one multiprocessor; only the order counts.

    A multiprocessor reads so many bytes a nanosecond while enough are in flight and eight warps take them apart, those
    of x, which L2 holds, four times as fast. A round of blocks costs its start and its stores besides. On an H200 it
    chooses the best of what was measured, or nearly.
    """
    BANDWIDTH, IN_FLIGHT, WARPS, RESERVED = 32.0, 48 * 1024, 8, 1024  # bytes/ns, bytes, -, bytes
    ROUND, SUM = 500.0, 2000.0  # ns

    def time(candidate: tuple[Config, int]) -> float:
        config, split = candidate
        registers = (16 if config.bm <= 16 else 8) // (config.threads // 32)
        resident = min(shared_total // (config.shared + RESERVED), registers)
        blocks = math.ceil(config.tiles_of(m, n) * split / multiprocessors)
        together = min(blocks, resident)
        rate = BANDWIDTH * min(1.0, together * (config.stages - 1) * config.slice_bytes / IN_FLIGHT)
        rate *= min(1.0, together * config.threads / 32 / WARPS)
        share = math.ceil(math.ceil(k / config.bk) / split)
        second = SUM + 8 * split * m * n / (BANDWIDTH * multiprocessors) if split > 1 else 0.0
        slice_bytes = config.slice_bytes + config.bm * config.bk * 2 / 4
        return math.ceil(blocks / resident) * (together * share * slice_bytes / rate + ROUND) + second

    fitting = [config for config in CONFIGS if config.bits == bits and config.shared <= shared_limit]
    enough = min((config.bm for config in fitting if config.bm >= m), default=max(config.bm for config in fitting))
    splits = range(1, min(_SPLITS, -(-k // min(config.bk for config in fitting))) + 1)
    return min(((c, split) for c in fitting if c.bm == enough for split in splits), key=time)
