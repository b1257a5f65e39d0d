"""What all GPU tiers of ``gemm_int8`` do with their sums: the host side of ``cuda/common/int8_epilogue.cuh``."""

from __future__ import annotations

import struct
from typing import NamedTuple

import torch

from qsparse.kernels._face import check_dtype, check_same_device, check_tensor, rows

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

_BARE = (torch.int32, torch.int64)
_QUANTIZED = (torch.int8, torch.uint8)
_LAYOUT = struct.Struct("@6P6i")
_OUT = {dtype: number for number, dtype in enumerate(OUT_DTYPES)}


class Epilogue(NamedTuple):
    """The arguments of ``gemm_int8`` from ``scale_x`` on, tensors or None; launches take them ``prepared``."""

    scale_x: torch.Tensor | None = None
    scale_w: torch.Tensor | None = None
    bias: torch.Tensor | None = None
    zero_x: torch.Tensor | None = None
    sums_w: torch.Tensor | None = None
    scale_y: torch.Tensor | None = None
    relu: bool = False

    def check(self, x: torch.Tensor, n: int, out_dtype: torch.dtype) -> None:
        """Raise unless each suits ``x`` (M, K), ``n`` outputs and their dtype, and lies on the device of ``x``."""
        check_dtype("out_dtype", out_dtype, OUT_DTYPES)
        scale_x, scale_w, bias, zero_x, sums_w, scale_y, _ = self
        m = x.shape[0]
        for name, value, size in (("scale_x", scale_x, m), ("scale_w", scale_w, n), ("bias", bias, n)):
            if value is None:
                continue
            if out_dtype in _BARE:
                raise ValueError(f"{name} has no meaning with out_dtype {out_dtype}, which is the bare accumulator")
            one = name != "bias" and isinstance(value, torch.Tensor) and value.numel() == 1
            check_tensor(name, value, (torch.float32,), (1 if one else size,))
        if zero_x is not None:
            one = isinstance(zero_x, torch.Tensor) and zero_x.numel() == 1
            check_tensor("zero_x", zero_x, (torch.int32,), (1 if one else m,))
        if sums_w is not None:
            check_tensor("sums_w", sums_w, (torch.int32,), (n,))
        if (scale_y is None) == (out_dtype in _QUANTIZED):
            raise ValueError(
                f"scale_y is needed for out_dtype int8 and uint8, and for no other; out_dtype is {out_dtype}"
            )
        if scale_y is not None:
            check_tensor("scale_y", scale_y, (torch.float32,), (1,))
        check_same_device(x, **dict(zip(self._fields[:-1], self[:-1], strict=True)))

    def prepared(self, w: torch.Tensor) -> Epilogue:
        """All of them contiguous, and ``sums_w`` computed from ``w``, the weights, where it is needed and left out."""
        scaling = self
        if self.zero_x is not None and self.sums_w is None:
            scaling = self._replace(sums_w=w.sum(1, dtype=torch.int32))
        arrays = [None if a is None else rows(a) for a in scaling[:-1]]
        return Epilogue(*arrays, relu=self.relu)

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
