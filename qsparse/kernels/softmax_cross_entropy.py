"""Softmax and cross-entropy: the loss and its gradient in one pass."""

from __future__ import annotations

import torch

from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face, rows
from qsparse.kernels._load import launch

BLOCK = 256
WARPS = BLOCK // 32


def _instance(dtype: torch.dtype) -> str:
    return f"softmax_cross_entropy<{C_FLOATS[dtype]}>"


SOURCES = {"softmax_cross_entropy.cu": tuple(map(_instance, C_FLOATS))}


@face(SOURCES)
def softmax_cross_entropy(logits, labels):
    """The cross-entropy of each row and the gradient of their mean.

    Parameters
    ----------
    logits : (M, C) float32, float16 or bfloat16, C >= 1
    labels : (M,) int64, each in [0, C)
        A label outside makes that row's loss and gradient NaN (checking would cost a device synchronisation).

    Returns
    -------
    losses : (M,) float32, in nats; ``losses.mean()`` is the batch's loss
    grad : (M, C), dtype of ``logits``: ``(softmax(logits) - onehot(labels)) / M``, the gradient of the mean loss

    Raises TypeError for another dtype, ValueError for shapes that do not fit.

    Source: the log-sum-exp form, shifted by the row's maximum so that no exponential overflows.
    """
    if torch.compiler.is_compiling():
        return _operator(logits, labels)
    check_tensor("logits", logits, tuple(C_FLOATS), (None, None))
    m, c = logits.shape
    check_tensor("labels", labels, (torch.int64,), (m,))
    if c == 0:
        raise ValueError("logits must have at least one column")
    check_same_device(logits, labels=labels)
    if logits.device.type == "cpu":
        return _cpu(logits, labels)
    logits, labels = rows(logits), rows(labels)
    losses = torch.empty(m, dtype=torch.float32, device=logits.device)
    grad = torch.empty_like(logits)
    launch(
        logits.device,
        "softmax_cross_entropy.cu",
        _instance(logits.dtype),
        "PPPPqq",
        (logits.data_ptr(), labels.data_ptr(), losses.data_ptr(), grad.data_ptr(), m, c),
        grid=-(-m // WARPS),
        block=BLOCK,
    )
    return losses, grad


@torch.library.custom_op("qsparse::softmax_cross_entropy", mutates_args=())
def _operator(logits: torch.Tensor, labels: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return softmax_cross_entropy(logits, labels)


@_operator.register_fake
def _(logits, labels):
    return logits.new_empty(logits.shape[0], dtype=torch.float32), logits.new_empty(logits.shape)


@torch.no_grad()
def _cpu(logits, labels):
    m, c = logits.shape
    valid = (labels >= 0) & (labels < c)
    at = torch.where(valid, labels, 0)[:, None]
    log_p = torch.log_softmax(logits.float(), 1)
    losses = -log_p.gather(1, at)[:, 0]
    grad = log_p.exp_()
    grad.scatter_add_(1, at, torch.full_like(at, -1, dtype=torch.float32))
    grad /= max(m, 1)
    if not valid.all():
        losses[~valid] = torch.nan
        grad[~valid] = torch.nan
    return losses, grad.to(logits.dtype)
