"""2:4 storage as the kernels read it: two of every four neighbouring columns, and which two, in four bits."""

from __future__ import annotations

import torch
from torch import Tensor


def padded(k: int) -> int:
    """The number of columns that is stored: K rounded up to whole bytes of metadata."""
    return -(-k // 8) * 8


def columns(metadata: Tensor) -> Tensor:
    """The columns, 0 to 3, that each group of four keeps: (N, Kp / 4, 2) int64 of ``metadata`` (N, Kp / 8)."""
    shifts = torch.arange(0, 8, 2, dtype=torch.uint8, device=metadata.device)
    return ((metadata[..., None] >> shifts) & 3).long().reshape(metadata.shape[0], metadata.shape[1] * 2, 2)


@torch.no_grad()
def expand(values: Tensor, metadata: Tensor, k: int) -> Tensor:
    """The dense (N, K) matrix, row-major, of ``values`` (N, Kp / 2) and ``metadata`` (N, Kp / 8)."""
    n, groups = metadata.shape[0], metadata.shape[1] * 2
    dense = torch.zeros((n, groups, 4), dtype=values.dtype, device=values.device)
    dense.scatter_(2, columns(metadata), values.reshape(n, groups, 2))
    return dense.reshape(n, groups * 4)[:, :k].contiguous()
