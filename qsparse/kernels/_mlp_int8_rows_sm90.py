"""The host side of ``mlp_int8_rows_sm90.cu``: which networks and batches it takes, how they are cut up, the launch.

A cluster takes a number of rows through all layers; what is free to choose is how many, and how many blocks share them.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, pairs_map, prepare, tensor_map

SOURCE = "mlp_int8_rows_sm90.cu"
LAYERS, LONGEST, HEAD, MOST_STAGES = 4, 1024, 64, 8  # as in the kernel
SHARED = 227 * 1024
_THREADS = 384
_ROW = 128  # bytes of K in a stage or a panel
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPiiii")
_NETWORK = struct.Struct("@PPiiiiii")
_FORMATS = f"{LAYERS * 128}s{LAYERS * _LAYER.size + _NETWORK.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``rows`` of a cluster of ``blocks``; ``tiles`` of 64 outputs a warpgroup.

    ``head`` rows at once are multiplied by the last layer, at least a block's share.
    """

    rows: int
    tiles: int
    blocks: int
    head: int

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        if self.rows % 16 or self.rows % (8 * self.blocks) or not self.rows // self.blocks <= self.head <= self.rows:
            raise ValueError(f"the blocks of a cluster cannot share out its rows: {self}")
        if self.tiles * self.rows > 320:
            raise ValueError(f"the sums do not fit a thread's registers: {self}")

    @property
    def instance(self) -> str:
        return f"mlp_int8_rows_sm90<{self.rows}, {self.tiles}, {self.blocks}, {self.head}>"

    @property
    def slice(self) -> int:
        """Outputs of a hidden layer that a block multiplies."""
        return 128 * self.tiles

    def stages(self, panels: int) -> int:
        """Stages of weights that fit beside ``panels`` of activations."""
        taken = self.rows * (panels * _ROW + 16) + (2 * MOST_STAGES + 2) * 8
        return min(MOST_STAGES, (SHARED - taken) // (self.slice * _ROW))

    def shared(self, panels: int) -> int:
        """Bytes of shared memory of a block."""
        taken = self.rows * (panels * _ROW + 16) + (2 * MOST_STAGES + 2) * 8
        return taken + self.stages(panels) * self.slice * _ROW


CONFIGS = (Config(16, 1, 2, 16),)
INSTANCES = tuple(config.instance for config in CONFIGS)


def panels(sizes: tuple[int, ...], config: Config) -> int | None:
    """Panels of 128 columns that hold a network's activations; None where ``config`` cannot take the network."""
    hidden = sizes[1:-1]
    if not 2 <= len(sizes) <= LAYERS + 1 or min(sizes) < 1 or sizes[0] > LONGEST or sizes[-1] > HEAD:
        return None
    if any(size % 16 for size in sizes[:-1]) or any(size > config.slice * config.blocks for size in hidden):
        return None
    found = max(-(-size // _ROW) for size in sizes[:-1])
    found = max(found, config.tiles * config.blocks) if hidden else found
    return found if config.stages(found) >= 2 else None


@functools.lru_cache(maxsize=1024)
def choose(sizes: tuple[int, ...], m: int, sms: int) -> Config | None:
    """The configuration for a network and a batch, or None where another kernel is faster or nothing fits.

    By timings on an NVIDIA H200, 2026-11-30, of 784-256-10: more than 64 rows of networks that a block or two hold, as
    long as each block finds a multiprocessor of its own.
    """
    config = CONFIGS[0]
    fits = m > 64 and -(-m // config.rows) * config.blocks <= sms
    return config if fits and panels(sizes, config) else None


def launch_mlp(x: torch.Tensor, layers: list[tuple], config: Config | None = None) -> torch.Tensor | None:
    """Logits (M, N) of ``layers`` (w, scale_w, bias or None, scale_x or None), or None where another kernel should run.

    ``config`` is what ``choose`` would give, for measurements.
    """
    sizes = (x.shape[1], *(w.shape[0] for w, *_ in layers))
    config = config or choose(sizes, x.shape[0], multiprocessors(x.device.index)[1])
    if config is None:
        return None
    count = panels(sizes, config)
    x = rows(x)
    layers = [
        (rows(w), rows(scale_w), None if bias is None else rows(bias), scale_x) for w, scale_w, bias, scale_x in layers
    ]
    if count is None or any(a.data_ptr() % 16 for a in (x, *(w for w, *_ in layers))):
        return None
    y = torch.empty((x.shape[0], sizes[-1]), dtype=torch.float32, device=x.device)
    maps, packed = [], []
    for i, (w, scale_w, bias, scale_x) in enumerate(layers):
        n, k = w.shape
        hidden = i < len(layers) - 1
        maps.append(
            pairs_map(w.data_ptr(), n, k, config.slice // 16)
            if hidden
            else tensor_map(w.data_ptr(), torch.int8, n, k, k, (HEAD, _ROW))
        )
        packed.append(
            _LAYER.pack(
                scale_w.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                0 if scale_x is None else scale_x.data_ptr(),
                n,
                k,
                int(scale_w.numel() > 1),
                0,
            )
        )
    network = _NETWORK.pack(
        x.data_ptr(), y.data_ptr(), x.shape[0], len(layers), _KINDS[x.dtype], count, config.stages(count), 0
    )
    launch = prepare(
        *(x.device.index, SOURCE, config.instance, _FORMATS),
        *(-(-x.shape[0] // config.rows) * config.blocks, _THREADS, config.shared(count)),
        cluster=config.blocks,
    )
    launch((b"".join(maps).ljust(LAYERS * 128, b"\0"), b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network))
    return y
