"""The loss: one pass computes it and its gradient."""

from __future__ import annotations

import torch

from qsparse import kernels


def cross_entropy(logits: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
    """Mean cross-entropy, in nats, of ``logits (M, C)`` against ``labels (M,)`` int64; differentiable by logits."""
    return _CrossEntropy.apply(logits, labels)


class _CrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, logits, labels):
        losses, grad = kernels.softmax_cross_entropy(logits, labels)
        ctx.save_for_backward(grad)
        return losses.mean()

    @staticmethod
    def backward(ctx, d_loss):
        (grad,) = ctx.saved_tensors
        return grad * d_loss.to(grad.dtype), None
