"""What all GPU tiers of ``gemm_int8`` do with their sums: the host side of ``cuda/common/int8_epilogue.cuh``."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

OUT_DTYPES = (
    torch.float32,
    torch.float16,
    torch.bfloat16,
    torch.int32,
    torch.int64,
    torch.int8,
    torch.uint8,
)
"""The output types, in the order of ``enum Int8Out``."""

FORMAT = "72s"
"""The kernel parameter's letter for ``_load.launch``; only parameters of 8 bytes or whole multiples may precede it."""

_LAYOUT = struct.Struct("@6P6i")
_OUT = {dtype: number for number, dtype in enumerate(OUT_DTYPES)}


class Epilogue(NamedTuple):
    """The arguments of ``gemm_int8`` from ``scale_x`` on, contiguous tensors on one GPU or None."""

    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    zero_x: torch.Tensor | None = None
    sums_w: torch.Tensor | None = None
    scale_y: torch.Tensor | None = None
    relu: bool = False

    def pack(self, out_dtype: torch.dtype) -> bytes:
        """``struct Int8Epilogue``."""
        scale_x, scale_w, bias, zero_x, sums_w, scale_y, relu = self
        return _LAYOUT.pack(
            *(0 if a is None else a.data_ptr() for a in (scale_x, scale_w, bias, scale_y, zero_x, sums_w)),
            *(0 if a is None or a.numel() == 1 else 1 for a in (scale_x, scale_w, zero_x)),
            relu,
            _OUT[out_dtype],
            0,
        )
