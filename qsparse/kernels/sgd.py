"""One step of stochastic gradient descent, in place."""

from __future__ import annotations

import torch

from qsparse.kernels._face import check_number, check_same_device, check_tensor, face
from qsparse.kernels._load import launch

BLOCK = 256
SOURCES = {"sgd.cu": ("sgd",)}


@face(SOURCES, in_place=("param", "momentum_buffer"))
def sgd(param, grad, momentum_buffer=None, *, lr, momentum=0.0, weight_decay=0.0, mask=None) -> None:
    """``g = grad + weight_decay * param; v = momentum * v + g; param -= lr * v``, all in place.

    Parameters
    ----------
    param : float32, any shape, contiguous; updated
    grad : float32, same shape
    momentum_buffer : float32, same shape, contiguous, optional; ``v``, updated
        Start it with zeros: the first step is then PyTorch's. Needed when ``momentum`` is not 0.
    lr : float, or one float32 element of any shape on the device of ``param``
        An array is read when the kernel runs: a CUDA graph's replays may differ in it.
    momentum, weight_decay : float
    mask : bool, same shape, optional
        Where it is False, ``param`` and ``momentum_buffer`` become exactly zero, whatever the gradient, momentum or
        weight decay say: a pruned weight stays pruned.

    Raises TypeError and ValueError naming the argument.

    Source: the update of ``torch.optim.SGD`` (dampening 0, no Nesterov).
    """
    lr_at = lr if isinstance(lr, torch.Tensor) else None
    if torch.compiler.is_compiling():
        rate = lr if lr_at is None else 0.0
        return _operator(param, grad, momentum_buffer, mask, rate, lr_at, momentum, weight_decay)
    lr = lr if lr_at is not None else check_number("lr", lr)
    momentum, weight_decay = check_number("momentum", momentum), check_number("weight_decay", weight_decay)
    shape = tuple(param.shape) if isinstance(param, torch.Tensor) else ()
    check_tensor("param", param, (torch.float32,), shape)
    check_tensor("grad", grad, (torch.float32,), shape)
    if momentum_buffer is not None:
        check_tensor("momentum_buffer", momentum_buffer, (torch.float32,), shape)
    elif momentum:
        raise ValueError(f"momentum is {momentum}, so a momentum_buffer is needed")
    if mask is not None:
        check_tensor("mask", mask, (torch.bool,), shape)
    if lr_at is not None:
        check_tensor("lr", lr, (torch.float32,), (1,) * lr.dim())
    check_same_device(param, grad=grad, momentum_buffer=momentum_buffer, mask=mask, lr=lr_at)
    for name, value in (("param", param), ("momentum_buffer", momentum_buffer)):
        if value is not None and not value.is_contiguous():
            raise ValueError(f"{name} is changed in place and must be contiguous")
    if param.device.type == "cpu":
        return _cpu(param, grad, momentum_buffer, float(lr), momentum, weight_decay, mask)
    grad = grad.contiguous()
    mask = None if mask is None else mask.contiguous()
    pointers = (0 if value is None else value.data_ptr() for value in (param, grad, momentum_buffer, mask, lr_at))
    launch(
        param.device,
        "sgd.cu",
        "sgd",
        "PPPPPqfff",
        (*pointers, param.numel(), lr if lr_at is None else 0.0, momentum, weight_decay),
        grid=-(-param.numel() // BLOCK),
        block=BLOCK,
    )


@torch.library.custom_op("qsparse::sgd", mutates_args=("param", "momentum_buffer"))
def _operator(
    param: torch.Tensor,
    grad: torch.Tensor,
    momentum_buffer: torch.Tensor | None,
    mask: torch.Tensor | None,
    lr: float,
    lr_at: torch.Tensor | None,
    momentum: float,
    weight_decay: float,
) -> None:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    lr = lr if lr_at is None else lr_at
    sgd(param, grad, momentum_buffer, lr=lr, momentum=momentum, weight_decay=weight_decay, mask=mask)


@torch.no_grad()
def _cpu(param, grad, momentum_buffer, lr, momentum, weight_decay, mask):
    if weight_decay:
        grad = grad.add(param, alpha=weight_decay)
    if momentum_buffer is not None:
        grad = momentum_buffer.mul_(momentum).add_(grad)
    param.add_(grad, alpha=-lr)
    if mask is not None:
        for value in (param, momentum_buffer):
            if value is not None:
                value[~mask] = 0  # assignment, not multiplication: NaN times zero would come back
