"""The operations of silu.cu and vector_add.cu: tensors in, a pointer each to the kernel, a new tensor out."""

from __future__ import annotations

from pathlib import Path

import torch

from qsparse.kernels._load import launch

HERE = Path(__file__).resolve().parent
SILU, VECTOR_ADD = str(HERE / "silu.cu"), str(HERE / "vector_add.cu")
THREADS = 256
_C = {torch.float32: "float", torch.float16: "__half"}
INSTANCES = {SILU: [f"{name}<{c}>" for name in ("silu", "silu_grad") for c in _C.values()], VECTOR_ADD: ["vector_add"]}


def _launch(source: str, instance: str, size: int, *arrays: torch.Tensor) -> torch.Tensor:
    """`size` elements a thread. Another dtype or layout than the kernels' would be misread: it is refused."""
    first = arrays[0]
    for array in arrays:
        if array.shape != first.shape or array.dtype != first.dtype or not array.is_contiguous():
            raise ValueError("the arrays must be contiguous, of one shape and one dtype")
        if array.data_ptr() % (first.element_size() * size):
            raise ValueError("the arrays must start on 16 bytes")
    out, n = torch.empty_like(first), first.numel()
    pointers = (array.data_ptr() for array in (*arrays, out))
    formats = "P" * (len(arrays) + 1) + "q"
    launch(first.device, source, instance, formats, (*pointers, n), grid=-(-n // (THREADS * size)), block=THREADS)
    return out


def _chunked(name: str, *arrays: torch.Tensor) -> torch.Tensor:
    dtype = arrays[0].dtype
    if dtype not in _C:
        raise TypeError(f"silu is for float32 and float16, not {dtype}")
    return _launch(SILU, f"{name}<{_C[dtype]}>", 16 // dtype.itemsize, *arrays)


def vector_add(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
    if a.dtype != torch.float32:
        raise TypeError(f"vector_add is for float32, not {a.dtype}")
    return _launch(VECTOR_ADD, "vector_add", 1, a, b)


def silu(x: torch.Tensor) -> torch.Tensor:
    return _chunked("silu", x)


def silu_grad(x: torch.Tensor, dy: torch.Tensor) -> torch.Tensor:
    return _chunked("silu_grad", x, dy)
