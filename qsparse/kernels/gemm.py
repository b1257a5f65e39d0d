"""Dense matrix product with a fused bias and ReLU."""

from __future__ import annotations

import torch

from qsparse.kernels._face import check_same_device, check_tensor, face, rows
from qsparse.kernels._load import launch

_C = {torch.float32: "float", torch.float16: "__half", torch.bfloat16: "__nv_bfloat16"}
_BOOL = ("false", "true")
BM = BN = 64  # the tile of gemm_simt.cu
BLOCK = 256


def _instance(dtype: torch.dtype, x_k_major: bool, w_k_major: bool) -> str:
    return f"gemm_simt<{_C[dtype]}, {_BOOL[x_k_major]}, {_BOOL[w_k_major]}>"


SOURCES = {
    "gemm_simt.cu": tuple(_instance(dtype, x, w) for dtype in _C for x in (True, False) for w in (True, False)),
}


@face(SOURCES)
def gemm(x, w, bias=None, *, relu: bool = False):
    """``y = act(x @ w.T + bias)``.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16
        Activations.
    w : (N, K), dtype of ``x``
        Weights, one row an output.
    bias : (N,), dtype of ``x``, optional
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.

    Returns
    -------
    (M, N), dtype of ``x``, row-major; sums are held in float32 and rounded once.

    Any strides work: a transposed view (``w.T``) is read in place, other views are copied first. So the backward
    products of a linear layer are ``gemm(dy, w.T)`` and ``gemm(dy.T, x.T)``.

    Raises TypeError for another dtype, ValueError for shapes that do not fit or arrays on two devices.

    Source: register-tiled product as in V. Volkov, J. Demmel, "Benchmarking GPUs to tune dense linear algebra"
    (SC 2008).
    """
    check_tensor("x", x, tuple(_C), (None, None))
    m, k = x.shape
    check_tensor("w", w, (x.dtype,), (None, k))
    n = w.shape[0]
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_same_device(x, w=w, bias=bias)
    if x.device.type == "cpu":
        return _cpu(x, w, bias, relu)
    x, x_k_major, ldx = _matrix(x)
    w, w_k_major, ldw = _matrix(w)
    bias = None if bias is None else rows(bias)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    launch(
        x.device,
        "gemm_simt.cu",
        _instance(x.dtype, x_k_major, w_k_major),
        "PqPqPPqqqi",
        (x.data_ptr(), ldx, w.data_ptr(), ldw, 0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, relu),
        grid=-(-m // BM) * -(-n // BN),
        block=BLOCK,
    )
    return y


def _matrix(a: torch.Tensor) -> tuple[torch.Tensor, bool, int]:
    """The matrix, whether its rows are the contiguous direction, and the stride of the other direction."""
    if a.stride(1) == 1 and a.stride(0) >= a.shape[1]:
        return a, True, a.stride(0)
    if a.stride(0) == 1 and a.stride(1) >= a.shape[0]:
        return a, False, a.stride(1)
    return rows(a), True, a.shape[1]


@torch.no_grad()
def _cpu(x, w, bias, relu):
    y = torch.nn.functional.linear(x, w, bias)
    return y.relu_() if relu else y
