"""One bit an output: which outputs a ReLU let through. For the tiers whose GEMM does not handle the bits itself."""

from __future__ import annotations

import torch


def words(n: int) -> int:
    """64-bit words that hold the bits of ``n`` columns."""
    return -(-n // 64)


def pack(y: torch.Tensor) -> torch.Tensor:
    """The mask (M, ceil(N / 64)) int64 of ``y`` (M, N): bit ``n % 64`` of word ``n // 64`` is ``y[m, n] > 0``."""
    m, n = y.shape
    bits = torch.zeros((m, words(n), 64), dtype=torch.int64, device=y.device)
    bits.view(m, -1)[:, :n] = y > 0
    return (bits << torch.arange(64, device=y.device)).sum(2)


def unpack(mask: torch.Tensor, n: int) -> torch.Tensor:
    """The bits of a mask as (M, n) bool."""
    bits = mask[:, :, None] >> torch.arange(64, device=mask.device) & 1
    return bits.reshape(mask.shape[0], -1)[:, :n].bool()
