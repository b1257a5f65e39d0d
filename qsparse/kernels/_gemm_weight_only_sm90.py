"""The host side of ``gemm_weight_only_sm90.cu``: which operands it takes, how blocks share them, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm_weight_only`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import multiprocessors, prepare

SOURCE = "gemm_weight_only_sm90.cu"
_DTYPES = (torch.float16, torch.bfloat16)
_PIECE, _HALF = 128, 64  # bytes of a weight row that a warp copies, and reads, at once
_SLOT = 16 * _PIECE  # bytes of a warp's piece
SHARED = 227 * 1024 - 1024  # bytes that a block may have, rounded
_SPLITS = (1, 2, 4, 8)  # blocks of a cluster


@dataclass(frozen=True)
class Config:
    """A block: 8 ``columns`` rows of x by 16 ``warps`` outputs, each warp ``ring`` pieces ahead."""

    bits: int
    columns: int
    warps: int
    ring: int

    @property
    def bn(self) -> int:
        """Outputs a block."""
        return 16 * self.warps

    @property
    def cols(self) -> int:
        """Columns of a piece."""
        return _PIECE * 8 // self.bits

    def phase(self, m: int) -> int:
        """Pieces of ``m`` rows of x that fit shared memory beside the rings."""
        return (SHARED - self.warps * self.ring * _SLOT) // (2 * 16 // self.bits * (m | 1) * 64)

    def shared(self, m: int, pieces: int) -> int:
        """Bytes of shared memory for ``pieces`` of x, in steps, as each size is a kernel of its own to the loader."""
        held = self.warps * self.ring * _SLOT + min(pieces, self.phase(m)) * (2 * 16 // self.bits * (m | 1) * 64)
        sums = 4 * 8 * self.columns * (self.bn + 4)
        return min(-(-max(held, sums) // 16384) * 16384, SHARED)

    def instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel."""
        return f"gemm_weight_only_sm90<{C_FLOATS[dtype]}, {self.bits}, {self.columns}, {self.warps}, {self.ring}>"


CONFIGS = tuple(Config(bits, columns, warps, 3) for bits in (8, 4) for columns in (1, 2) for warps in (4, 16))
INSTANCES = tuple(config.instance(dtype) for config in CONFIGS for dtype in _DTYPES)


def supports(x: torch.Tensor, w: torch.Tensor, ldw: int, group: int | None) -> bool:
    """Whether the kernel can read these operands: few rows, weights on 16 bytes, groups of whole pieces."""
    (m, k), n, bits = x.shape, w.shape[0], 8 if w.dtype == torch.int8 else 4
    return (
        x.dtype in _DTYPES
        and 0 < m <= 16
        and n > 0
        and k > 0
        and (w.data_ptr() | ldw) % 16 == 0
        and k * bits % 128 == 0
        and max(n, 2 * k) < 2**31 - 4096  # the kernel counts in 32 bits
        and (group is None or (group % (_HALF * 8 // bits) == 0 and k // 64 * (group // 64) < 2**32))
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
    x : (M, K) float16 or bfloat16, M <= 16, contiguous rows ``ldx`` elements apart
    w : (N, K) int8 or (N, K / 2) uint8, rows ``ldw`` bytes apart, on 16 bytes and multiples of them
    scale : (N,) or (N, ceil(K / group)) float32, row-major
    group : a multiple of 64 (int8) or 128 (int4) columns, or None
    bias : (N,) contiguous, dtype of ``x``, or None
    y : (M, N) row-major, dtype of ``x``
        Written whole.
    config, split
        The block, and the number of blocks that divide K; chosen by shape and device where None.
    """
    (m, k), n = x.shape, w.shape[0]
    bits = 8 if w.dtype == torch.int8 else 4
    if config is None:
        config, split = choose(bits, m, n, k, multiprocessors(x.device.index)[1])
    pieces = -(-k // config.cols)
    share = -(-pieces // split)
    group = (group or 0) // (config.cols // 2)
    inverse = -(-(2**32) // group) if group > 1 else 0
    aligned = (x.data_ptr() | 2 * ldx) % 16 == 0
    launch = prepare(
        *(x.device.index, SOURCE, config.instance(x.dtype), "PqiPqPiiIPPiiiiii"),
        *(-(-n // config.bn) * split, 32 * config.warps, config.shared(m, share)),
        cluster=split,
    )
    operands = (x.data_ptr(), ldx, aligned, w.data_ptr(), ldw)
    scales = (scale.data_ptr(), scale.shape[1] if group else 1, group, inverse)
    bias_address = 0 if bias is None else bias.data_ptr()
    launch((*operands, *scales, bias_address, y.data_ptr(), m, n, k, relu, split, config.phase(m)))


@functools.lru_cache(maxsize=4096)
def choose(bits: int, m: int, n: int, k: int, sms: int) -> tuple[Config, int]:
    """The block and the split of K with the least time by a rough model; only the order counts.

    A multiprocessor reads weights at its share of the memory's speed, or, where a warp reads little, waits for memory
    once for every `ring` pieces; all blocks read their part of x out of the L2 cache; a cluster's barriers take longer
    than none, and blocks that find no place begin when others end.
    """
    PIECE, LATENCY, CLUSTER, L2, WAVE = 64.0, 800.0, 800.0, 4500.0, 1000.0  # ns, ns, ns, bytes/ns, ns

    def time(candidate: tuple[Config, int]) -> float:
        config, split = candidate
        pieces = -(-k // config.cols)
        share = -(-pieces // split)
        tiles = -(-n // config.bn)
        blocks = -(-tiles * split // sms)
        waves = -(-blocks // min(32 // config.warps, (SHARED + 1024) // (config.shared(m, share) + 1024)))
        weights = max(blocks * config.warps * share * PIECE, waves * share / config.ring * LATENCY)
        return weights + tiles * m * 2 * k / L2 + (CLUSTER if split > 1 else 0.0) + (waves - 1) * WAVE

    fitting = [config for config in CONFIGS if config.bits == bits and config.columns == (1 if m <= 8 else 2)]
    return min(((config, split) for config in fitting for split in _SPLITS), key=time)
