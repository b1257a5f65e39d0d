"""What the CSR and the COO face share: the choice between the two kernels of ``cuda/common/spmm.cuh``."""

from __future__ import annotations

import functools
import warnings

import torch

from qsparse.kernels._face import C_FLOATS, rows
from qsparse.kernels._load import launch

TILE, WARPS, BLOCK = 32, 8, 256
SMALL_M = 8  # up to here a warp an output beats transposing x
_INT32 = 2**31 - 1


def instances(op: str) -> tuple[str, ...]:
    return tuple(f"{op}_{part}<{c_type}>" for part in ("small", "large", "transpose") for c_type in C_FLOATS.values())


def spmm(op: str, x, entries, formats: str, bias, n: int, relu: bool):
    """Launch ``op`` (``spmm_csr`` or ``spmm_coo``); ``entries`` are its arguments that describe W."""
    m, k = x.shape
    x = rows(x)
    bias = None if bias is None else rows(bias)  # a copy must live until the launch
    bias_address = 0 if bias is None else bias.data_ptr()
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)

    def run(part: str, kinds: str, arguments: tuple, blocks: int) -> None:
        launch(x.device, f"{op}.cu", f"{op}_{part}<{C_FLOATS[x.dtype]}>", kinds, arguments, grid=blocks, block=BLOCK)

    if m <= SMALL_M:
        arguments = (x.data_ptr(), *entries, bias_address, y.data_ptr(), m, n, k, relu)
        run("small", f"P{formats}PPqqqi", arguments, -(-m * n // WARPS))
        return y
    xt = torch.empty((k, m), dtype=x.dtype, device=x.device)
    run("transpose", "PPqq", (x.data_ptr(), xt.data_ptr(), m, k), -(-m // TILE) * -(-k // TILE))
    arguments = (xt.data_ptr(), *entries, bias_address, y.data_ptr(), m, n, relu)
    run("large", f"P{formats}PPqqi", arguments, -(-m // TILE) * -(-n // TILE))
    return y


def check_indices(name: str, indices: torch.Tensor, size: int) -> None:
    """Raise ValueError naming the first index outside [0, size). On a GPU this waits for the device."""
    outside = (indices < 0) | (indices >= size)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(f"{name}[{at}] is {int(indices[at])}, outside [0, {size})")


def check_shape(w_shape, k: int) -> int:
    """Check the shape of W against the width of x; returns N."""
    try:
        n, w_k = (int(size) for size in w_shape)
    except (TypeError, ValueError):
        raise ValueError(f"shape must be two sizes (N, {k}), got {w_shape!r}") from None
    if n < 0 or w_k != k:
        raise ValueError(f"shape must be (N, {k}) to fit x, got {tuple(w_shape)}")
    if n > _INT32 or k > _INT32:
        raise ValueError(f"shape {tuple(w_shape)} does not fit int32 indices")
    return n


@functools.cache
def _silence_beta_warning() -> None:
    """PyTorch warns once a process that CSR is in beta; let that once be here, and unheard."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)
        empty = torch.zeros(1, dtype=torch.int32)
        torch.sparse_csr_tensor(empty, empty[:0], torch.zeros(0), size=(0, 0), check_invariants=False)


@torch.no_grad()
def cpu(x, layout: torch.layout, indices: tuple, values, shape, bias, relu: bool):
    """PyTorch's CPU kernels; halves are computed in float32, since CSR has no half there."""
    _silence_beta_warning()
    make = torch.sparse_csr_tensor if layout == torch.sparse_csr else _coo_tensor
    w = make(*indices, values.float(), size=tuple(shape), check_invariants=False)
    y = (w @ x.float().t()).t()
    if bias is not None:
        y = y + bias.float()
    y = y.relu_() if relu else y
    return rows(y.to(x.dtype))


def _coo_tensor(row_indices, cols, values, **options):
    return torch.sparse_coo_tensor(torch.stack((row_indices, cols)).long(), values, **options)
