"""The host side of ``linear_int8_sm90.cu``: which layers it takes, how a batch is cut up, the launch."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import pairs_map, prepare

SOURCE = "linear_int8_sm90.cu"
LONGEST, MOST_STAGES = 1024, 8  # as in the kernel
SHARED = 227 * 1024
_THREADS = 384
_ROW = 128  # bytes of K in a stage or a panel
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LINEAR = struct.Struct("@5P8i")
_FORMATS = f"128s{_LINEAR.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``rows`` of a cluster of ``blocks``; ``tiles`` of 64 outputs a warpgroup."""

    rows: int
    tiles: int
    blocks: int

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        if self.rows % 16 or self.rows % (8 * self.blocks):
            raise ValueError(f"the blocks of a cluster cannot share out its rows: {self}")
        if self.tiles * self.rows > 320:
            raise ValueError(f"the sums do not fit a thread's registers: {self}")

    def instance(self, out: torch.dtype) -> str:
        """The C++ name of the kernel."""
        return f"linear_int8_sm90<{C_FLOATS[out]}, {self.rows}, {self.tiles}, {self.blocks}>"

    def stages(self, k: int) -> int:
        """Stages of weights that fit beside the rows."""
        return min(MOST_STAGES, (SHARED - self._fixed(k)) // self._stage)

    def shared(self, k: int) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed(k) + self.stages(k) * self._stage

    @property
    def _stage(self) -> int:
        return 128 * self.tiles * _ROW

    def _fixed(self, k: int) -> int:
        return self.rows * (-(-k // _ROW) * _ROW + 4) + (2 * MOST_STAGES + 1) * 8


CONFIGS = (Config(80, 2, 1), Config(160, 2, 4), Config(64, 1, 8), Config(64, 1, 2))
INSTANCES = tuple(config.instance(out) for config in CONFIGS for out in C_FLOATS)


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel takes these contiguous operands."""
    (m, k), n = x.shape, w.shape[0]
    aligned = n % 16 == k % 16 == x.data_ptr() % 16 == w.data_ptr() % 16 == 0
    return aligned and min(m, n, k) > 0 and k <= LONGEST and max(m, n) < 2**30


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, sms: int, demanded: bool | None = None) -> Config | None:
    """The configuration for a shape; None where, unless it is ``demanded``, two kernels are faster."""
    return CONFIGS[0] if demanded else None


def launch_linear(x, w, scale_w, bias, scale_x, y, relu: bool, config: Config) -> None:
    """Write the layer of ``x`` (M, K), quantized by row or by ``scale_x``, and ``w`` (N, K) into ``y`` (M, N)."""
    (m, k), n = x.shape, w.shape[0]
    launch = _plan(x.device.index, m, k, y.dtype, config)
    launch(
        (
            pairs_map(w.data_ptr(), n, k, 8 * config.tiles),
            _LINEAR.pack(
                x.data_ptr(),
                scale_w.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                0 if scale_x is None else scale_x.data_ptr(),
                y.data_ptr(),
                m,
                n,
                k,
                int(scale_w.numel() > 1),
                _KINDS[x.dtype],
                config.stages(k),
                relu,
                0,
            ),
        )
    )


@functools.lru_cache(maxsize=4096)
def _plan(device: int, m: int, k: int, out: torch.dtype, config: Config):
    blocks = -(-m // config.rows) * config.blocks
    grid = blocks, _THREADS, config.shared(k)
    return prepare(device, SOURCE, config.instance(out), _FORMATS, *grid, cluster=config.blocks)
