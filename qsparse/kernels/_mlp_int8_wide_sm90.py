"""The host side of ``mlp_int8_wide_sm90.cu``: the first layer of a network that is too wide for one launch."""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, pairs_map, prepare, tensor_map

SOURCE = "mlp_int8_wide_sm90.cu"
LONGEST, MOST_STAGES = 1024, 8  # as in the kernel
SHARED = 227 * 1024
_THREADS = 384
_ROW = 128  # bytes of K in a stage or a panel
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_FIRST = struct.Struct("@6P6i")
_FORMATS = f"128s128s{_FIRST.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``rows`` of a cluster of ``blocks``; ``tiles`` of 64 outputs a warpgroup."""

    rows: int
    tiles: int
    blocks: int

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        share = -(-self.rows // self.blocks // 8) * 8
        if self.rows % 16 or self.rows % share:
            raise ValueError(f"the blocks of a cluster cannot share out its rows: {self}")
        if self.tiles * self.rows > 320:
            raise ValueError(f"the sums do not fit a thread's registers: {self}")

    @property
    def instance(self) -> str:
        return f"mlp_int8_wide_sm90<{self.rows}, {self.tiles}, {self.blocks}>"

    @property
    def slice(self) -> int:
        """Outputs that a block multiplies."""
        return 128 * self.tiles

    def stages(self, k: int) -> int:
        """Stages of weights that fit beside the rows."""
        return min(MOST_STAGES, (SHARED - self._fixed(k)) // (self.slice * _ROW))

    def shared(self, k: int) -> int:
        """Bytes of shared memory of a block."""
        return self._fixed(k) + self.stages(k) * self.slice * _ROW

    def _fixed(self, k: int) -> int:
        panels = max(-(-k // _ROW), self.tiles)
        return self.rows * (panels * _ROW + 16) + (2 * MOST_STAGES + 2) * 8


CONFIGS = (Config(160, 2, 16), Config(128, 2, 16))
INSTANCES = tuple(config.instance for config in CONFIGS)


@functools.lru_cache(maxsize=1024)
def choose(m: int, n: int, k: int, sms: int) -> Config | None:
    """The configuration for a shape, or None where other kernels are faster or nothing fits."""
    return None


def launch_first(x, w, scale_w, bias, scale_x, scale_y, config: Config | None = None):
    """A first layer with a ReLU: the second's input q (M, N) int8 and its scales (M,); None where it is not for it.

    ``scale_x`` and ``scale_y`` are the static scales of its input and output, or None. ``config`` is what ``choose``
    would give, for measurements.
    """
    (m, k), n = x.shape, w.shape[0]
    config = config or choose(m, n, k, multiprocessors(x.device.index)[1])
    if config is None or n > config.slice * config.blocks or k > LONGEST or n % 16 or k % 16:
        return None
    x, w, scale_w, bias = rows(x), rows(w), rows(scale_w), None if bias is None else rows(bias)
    if (x.data_ptr() | w.data_ptr()) % 16:
        return None
    q = torch.empty((m, n), dtype=torch.int8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    pointers = (0 if a is None else a.data_ptr() for a in (x, scale_w, bias, scale_x, scale_y, scales))
    packed = _FIRST.pack(*pointers, m, n, k, int(scale_w.numel() > 1), _KINDS[x.dtype], config.stages(k))
    clusters = -(-m // config.rows)
    launch = prepare(
        *(x.device.index, SOURCE, config.instance, _FORMATS, clusters * config.blocks, _THREADS, config.shared(k)),
        cluster=config.blocks,
    )
    w_map = pairs_map(w.data_ptr(), n, k, config.slice // 16)
    launch((w_map, tensor_map(q.data_ptr(), q.dtype, m, n, n, (config.rows, _ROW)), packed))
    return q, scales
