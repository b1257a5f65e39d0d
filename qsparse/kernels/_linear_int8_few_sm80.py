"""The host side of ``linear_int8_few_sm80.cu``: layers with few outputs, which a network's head is."""

from __future__ import annotations

import functools
import struct

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import prepare

SOURCE = "linear_int8_few_sm80.cu"
OUTPUTS, LONGEST = 16, 4096
_ROWS, _THREADS, _PIECE = 8, 128, 64  # as in the kernel
_KINDS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_HEAD = struct.Struct("@6P6i")
_FORMATS = f"{_HEAD.size}s"


def instance(dtype: torch.dtype, k: int) -> str:
    """The C++ name of the kernel for rows of ``k`` elements: it holds 1,024 or 4,096 of them."""
    held = 1024 if k <= 1024 else LONGEST
    return f"linear_int8_few_sm80<{C_FLOATS[dtype]}, {held * dtype.itemsize // 512}>"


INSTANCES = tuple(instance(dtype, k) for dtype in C_FLOATS for k in (1024, LONGEST))


def supports(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether the kernel takes these contiguous operands."""
    (m, k), n = x.shape, w.shape[0]
    return (
        0 not in (m, n, k) and n <= OUTPUTS and k <= LONGEST and k % 16 == x.data_ptr() % 16 == w.data_ptr() % 16 == 0
    )


def launch_linear(x, w, scale_w, bias, scale_x, y, relu: bool) -> None:
    """Write the layer of ``x`` (M, K), quantized by row or by ``scale_x``, and ``w`` (N, K) into ``y`` (M, N)."""
    (m, k), n = x.shape, w.shape[0]
    pointers = (0 if a is None else a.data_ptr() for a in (x, w, scale_w, bias, scale_x, y))
    packed = _HEAD.pack(*pointers, m, n, k, int(scale_w.numel() > 1), _KINDS[y.dtype], relu)
    _plan(x.device.index, m, k, x.dtype)((packed,))


@functools.lru_cache(maxsize=4096)
def _plan(device: int, m: int, k: int, dtype: torch.dtype):
    shared = _ROWS * (-(-k // _PIECE) | 1) * _PIECE
    return prepare(device, SOURCE, instance(dtype, k), _FORMATS, -(-m // _ROWS), _THREADS, shared)
