"""2:4 storage as the kernels read it: two of every four neighbouring columns, and which two, in four bits."""

from __future__ import annotations

import weakref
from collections.abc import Callable

import torch
from torch import Tensor

from qsparse.kernels._face import check_tensor, matrix
from qsparse.kernels._load import launch

SOURCE, INT8_SOURCE = "gemm_24.cu", "gemm_int8_24.cu"
INSTANCES, INT8_INSTANCES = ("expand_24<unsigned short>", "expand_24<unsigned>"), ("expand_24<unsigned char>",)
_BY_SIZE = {1: (INT8_SOURCE, INT8_INSTANCES[0]), 2: (SOURCE, INSTANCES[0]), 4: (SOURCE, INSTANCES[1])}
_BLOCK = 256


def padded(k: int) -> int:
    """The number of columns that is stored: K rounded up to whole bytes of metadata."""
    return -(-k // 8) * 8


def columns(metadata: Tensor) -> Tensor:
    """The columns, 0 to 3, that each group of four keeps: (N, Kp / 4, 2) int64 of ``metadata`` (N, Kp / 8)."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=metadata.device)
    return ((metadata[..., None] >> shifts) & 3).long().reshape(metadata.shape[0], metadata.shape[1] * 2, 2)


def check(x: Tensor, values, metadata, dtypes: tuple[torch.dtype, ...]) -> int:
    """The number of outputs; raise unless ``values`` and ``metadata`` are a 2:4 matrix as wide as ``x``."""
    width = padded(x.shape[1])
    check_tensor("values", values, dtypes, (None, width // 2))
    check_tensor("metadata", metadata, (torch.uint8,), (values.shape[0], width // 8))
    return values.shape[0]


@torch.no_grad()
def expand(values: Tensor, metadata: Tensor, k: int) -> Tensor:
    """The dense (N, K) matrix of ``values`` (N, Kp / 2) and ``metadata`` (N, Kp / 8).

    On a GPU its rows begin on 16-byte boundaries, as the dense products like them.
    """
    n, width = metadata.shape[0], padded(k)
    if values.device.type == "cpu" or not values.numel():
        dense = torch.zeros((n, width // 4, 4), dtype=values.dtype, device=values.device)
        dense.scatter_(2, columns(metadata), values.reshape(n, width // 4, 2))
        return dense.reshape(n, width)[:, :k].contiguous()
    (values, _, ldv), (metadata, _, ldm) = (matrix(a, k_major=True) for a in (values, metadata))
    dense = torch.empty((n, -(-width // 16) * 16), dtype=values.dtype, device=values.device)
    source, instance = _BY_SIZE[values.element_size()]
    arguments = (values.data_ptr(), ldv, metadata.data_ptr(), ldm, dense.data_ptr(), dense.shape[1], n, width // 8)
    launch(values.device, source, instance, "PqPqPqqi", arguments, grid=-(-n * (width // 8) // _BLOCK), block=_BLOCK)
    return dense[:, :k]


def on_boundaries(a: Tensor) -> Tensor:
    """``a`` (R, C) with contiguous rows that begin on 16-byte boundaries, as the copy engine reads them."""
    a, _, ld = matrix(a, k_major=True)
    size = a.element_size()
    if a.data_ptr() % 16 == ld * size % 16 == 0:
        return a
    copy = torch.zeros((a.shape[0], -(-a.shape[1] * size // 16) * 16 // size), dtype=a.dtype, device=a.device)
    copy[:, : a.shape[1]] = a
    return copy[:, : a.shape[1]]


_kept: dict[tuple, tuple] = {}


def kept(a: Tensor, make: Callable[..., Tensor], *arguments: int) -> Tensor:
    """``make(a, *arguments)`` of weights: made once, and again when ``a`` has changed, and kept as long as ``a`` lives.

    It stays in the same memory, which a captured graph may read.
    """
    key = id(a), make, *arguments
    whose, version, found = _kept.get(key, (None, None, None))
    known = whose is not None and whose() is a
    if known and version == a._version:
        return found
    # What is kept is written again when `a` changes, which an inference tensor would not allow outside its mode.
    with torch.inference_mode(a.is_inference()), torch.no_grad():
        made = make(a, *arguments)
    # An inference tensor does not count its changes, and a graph's memory is its own.
    if made is a or a.is_inference() or (a.is_cuda and torch.cuda.is_current_stream_capturing()):
        return made
    if known and made.shape == found.shape:
        made = found.copy_(made)
    if a.is_cuda:
        torch.cuda.current_stream(a.device).synchronize()  # the next call may be on another stream
    _kept[key] = weakref.ref(a, lambda _: _kept.pop(key, None)), a._version, made
    return made
