"""Backward of a linear layer's bias and ReLU."""

from __future__ import annotations

import torch

from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, face, rows
from qsparse.kernels._load import launch

COLUMNS, BLOCK = 32, 256  # a block of bias_relu_grad.cu owns 32 columns


def _instance(dtype: torch.dtype) -> str:
    return f"bias_relu_grad<{C_FLOATS[dtype]}>"


SOURCES = {"bias_relu_grad.cu": tuple(map(_instance, C_FLOATS))}


@face(SOURCES)
def bias_relu_grad(dy, y=None):
    """Gradients before the activation, ``dz``, and of the bias, ``db``, from those after it.

    Parameters
    ----------
    dy : (M, N) float32, float16 or bfloat16
        Gradient of the loss by the layer's output ``y = relu(z + bias)``.
    y : (M, N), dtype of ``dy``, optional
        The layer's output; left out, the layer has no ReLU and ``dz`` is ``dy``.

    Returns
    -------
    dz : (M, N), dtype of ``dy``: ``dy`` where ``y > 0``, else 0
    db : (N,), dtype of ``dy``: the column sums of ``dz``, summed in float32 in a fixed order

    Raises TypeError for another dtype, ValueError for shapes that do not fit.

    Source: D. E. Rumelhart, G. E. Hinton, R. J. Williams, "Learning representations by back-propagating errors" (1986).
    """
    if torch.compiler.is_compiling():
        dz, db = _operator(dy, y)
        return (dy if y is None else dz), db
    check_tensor("dy", dy, tuple(C_FLOATS), (None, None))
    if y is not None:
        check_tensor("y", y, (dy.dtype,), tuple(dy.shape))
    check_same_device(dy, y=y)
    if dy.device.type == "cpu":
        return _cpu(dy, y)
    m, n = dy.shape
    dy = rows(dy)
    y = None if y is None else rows(y)
    dz = dy if y is None else torch.empty_like(dy)
    db = torch.empty(n, dtype=dy.dtype, device=dy.device)
    launch(
        dy.device,
        "bias_relu_grad.cu",
        _instance(dy.dtype),
        "PPPPqq",
        (dy.data_ptr(), 0 if y is None else y.data_ptr(), dz.data_ptr(), db.data_ptr(), m, n),
        grid=-(-n // COLUMNS),
        block=BLOCK,
    )
    return dz, db


@torch.library.custom_op("qsparse::bias_relu_grad", mutates_args=())
def _operator(dy: torch.Tensor, y: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """What ``torch.compile`` sees in place of the face, which it could not trace into.

    An operator may not return its argument, so without ``y`` the first result is empty and not used.
    """
    dz, db = bias_relu_grad(dy, y)
    return (dy.new_empty(0) if y is None else dz), db


@_operator.register_fake
def _(dy, y):
    return dy.new_empty(0 if y is None else dy.shape), dy.new_empty(dy.shape[1])


@torch.no_grad()
def _cpu(dy, y):
    dz = dy if y is None else torch.where(y > 0, dy, 0)
    return dz, dz.sum(0, dtype=torch.float32).to(dy.dtype)
