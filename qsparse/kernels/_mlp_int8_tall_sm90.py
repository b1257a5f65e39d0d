"""The host side of ``mlp_int8_tall_sm90.cu``: which networks and batches it takes, how they are cut up, the launch.

A block takes a number of rows through all layers; what is free to choose is how many.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS, rows
from qsparse.kernels._load import multiprocessors, pairs_map, prepare, tensor_map

SOURCE = "mlp_int8_tall_sm90.cu"
LAYERS, LONGEST, WIDEST, HEAD, MOST_STAGES = 4, 1024, 256, 64, 7  # as in the kernel
SHARED = 227 * 1024
_THREADS = 512
_ROW = 128  # bytes of K in a stage or a panel
_STAGE = WIDEST * _ROW
_LAYER = struct.Struct("@PPPiiii")
_NETWORK = struct.Struct("@PPiiii")
_FORMATS = f"{LAYERS * 128}s{LAYERS * _LAYER.size + _NETWORK.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``rows`` of a block."""

    rows: int

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions would refuse."""
        if self.rows % 16 or not 0 < self.rows <= 80:
            raise ValueError(f"a block has a multiple of 16 rows up to 80: {self}")

    def instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel for inputs of this type."""
        return f"mlp_int8_tall_sm90<{C_FLOATS[dtype]}, {self.rows}>"

    def _taken(self, panels: int) -> int:
        return self.rows * (panels * _ROW + 16) + 2 * MOST_STAGES * 8

    def stages(self, panels: int) -> int:
        """Stages of weights that fit beside ``panels`` of activations."""
        return min(MOST_STAGES, (SHARED - self._taken(panels)) // _STAGE)

    def shared(self, panels: int) -> int:
        """Bytes of shared memory of a block."""
        return self._taken(panels) + self.stages(panels) * _STAGE


CONFIGS = Config(16), Config(80)
INSTANCES = tuple(config.instance(dtype) for config in CONFIGS for dtype in C_FLOATS)


@functools.lru_cache(maxsize=1024)
def panels(sizes: tuple[int, ...]) -> int | None:
    """Panels of 128 columns that hold a network's activations; None where the kernel cannot take the network."""
    *inputs, outputs = sizes
    hidden = sizes[1:-1]
    if not hidden or len(inputs) > LAYERS or min(sizes) < 1 or outputs > HEAD:
        return None
    if max(inputs) > LONGEST or max(hidden) > WIDEST or any(size % 16 for size in inputs):
        return None
    return max(WIDEST // _ROW, -(-max(inputs) // _ROW))


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Config | None:
    """The configuration for a network and a batch, or None where another kernel is faster or nothing fits.

    By timings on an NVIDIA H200, 2026-11-30, of 784-256-10: more than 1,024 rows, up to as many as all multiprocessors
    hold at once.
    """
    if m <= 8 * sms or not panels(sizes):
        return None
    return next((config for config in CONFIGS if -(-m // config.rows) <= sms), None)


def launch_mlp(x: torch.Tensor, layers: list[tuple], config: Config | None = None) -> torch.Tensor | None:
    """Logits (M, N) of ``layers`` (w, scale_w, bias or None, scale_x or None), or None where another kernel should run.

    ``config`` is what ``choose`` would give, for measurements.
    """
    sizes = (x.shape[1], *(w.shape[0] for w, *_ in layers))
    config = config or choose(sizes, x.shape[0], multiprocessors(x.device.index)[1])
    if config is None:
        return None
    count = panels(sizes)
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
        maps.append(
            pairs_map(w.data_ptr(), n, k, WIDEST // 16)
            if i < len(layers) - 1
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
    network = _NETWORK.pack(x.data_ptr(), y.data_ptr(), x.shape[0], len(layers), count, config.stages(count))
    launch = prepare(
        *(x.device.index, SOURCE, config.instance(x.dtype), _FORMATS),
        *(-(-x.shape[0] // config.rows), _THREADS, config.shared(count)),
    )
    launch((b"".join(maps).ljust(LAYERS * 128, b"\0"), b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network))
    return y
