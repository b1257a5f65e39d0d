"""What all GPU tiers of ``gemm_int8`` do with their sums: the host side of ``cuda/common/int8_epilogue.cuh``."""

from __future__ import annotations

import struct
from dataclasses import dataclass

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


@dataclass(frozen=True, slots=True)
class Epilogue:
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
        arrays = self.scale_x, self.scale_w, self.bias, self.scale_y, self.zero_x, self.sums_w
        return _LAYOUT.pack(
            *(0 if a is None else a.data_ptr() for a in arrays),
            *(0 if a is None or a.numel() == 1 else 1 for a in (self.scale_x, self.scale_w, self.zero_x)),
            self.relu,
            OUT_DTYPES.index(out_dtype),
            0,
        )
