"""What the layers share."""

from __future__ import annotations

import torch

DTYPES = {str(dtype).removeprefix("torch."): dtype for dtype in (torch.float32, torch.float16, torch.bfloat16)}


def check_activation(activation: str | None) -> None:
    if activation not in (None, "relu"):
        raise ValueError(f'activation must be None or "relu", got {activation!r}')


def by_rows(x: torch.Tensor, function) -> torch.Tensor:
    """Apply a function of matrices to ``x (..., K)`` by flattening the leading dimensions."""
    if x.dim() == 2:
        return function(x)
    y = function(x.reshape(x.shape[:-1].numel(), x.shape[-1]))  # -1 would be ambiguous in an empty batch
    return y.reshape(*x.shape[:-1], y.shape[-1])
