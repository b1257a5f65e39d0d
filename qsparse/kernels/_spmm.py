"""What the CSR and the COO face share: checks, the product on a CPU, and the choice of a tier on a GPU."""

from __future__ import annotations

import functools
import operator
import warnings

import torch

from qsparse.kernels import _spmm_sm80
from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, kind_of, rows
from qsparse.kernels._load import launch

_TILE, _WARPS, _BLOCK = 32, 8, 256
_SIMT_SMALL_M = 8  # up to here a warp an output beats transposing x
_INT32 = 2**31 - 1
_UINT16 = 2**16
_MOST_ENTRIES = 2**31 - 2**14  # kernels count entries in ints, up to a few thousand beyond the last one


def simt_instances(op: str) -> tuple[str, ...]:
    """The kernels of ``spmm_csr.cu`` or ``spmm_coo.cu``."""
    return tuple(f"{op}_{part}<{c_type}>" for part in ("small", "large", "transpose") for c_type in C_FLOATS.values())


def has_sm80(device: torch.device) -> bool:
    """Whether the kernels with asynchronous barriers run there."""
    return torch.cuda.get_device_capability(device) >= (8, 0)


def sort_entries(values, rows, cols, k: int, by_columns: bool):
    """COO entries by row, and within a row by column or as they came; duplicates stay in their order."""
    key = rows.long() * k + cols if by_columns else rows
    order = torch.sort(key, stable=True).indices
    return values[order], rows[order], cols[order]


def simt(op: str, x, entries, formats: str, bias, n: int, relu: bool):
    """Launch ``op`` (``spmm_csr`` or ``spmm_coo``); ``entries`` are its arguments that describe W."""
    m, k = x.shape
    x = rows(x)
    bias = None if bias is None else rows(bias)  # a copy must live until the launch
    bias_address = 0 if bias is None else bias.data_ptr()
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)

    def run(part: str, kinds: str, arguments: tuple, blocks: int) -> None:
        launch(x.device, f"{op}.cu", f"{op}_{part}<{C_FLOATS[x.dtype]}>", kinds, arguments, grid=blocks, block=_BLOCK)

    if m <= _SIMT_SMALL_M:
        arguments = (x.data_ptr(), *entries, bias_address, y.data_ptr(), m, n, k, relu)
        run("small", f"P{formats}PPqqqi", arguments, -(-m * n // _WARPS))
        return y
    xt = torch.empty((k, m), dtype=x.dtype, device=x.device)
    run("transpose", "PPqq", (x.data_ptr(), xt.data_ptr(), m, k), -(-m // _TILE) * -(-k // _TILE))
    arguments = (xt.data_ptr(), *entries, bias_address, y.data_ptr(), m, n, relu)
    run("large", f"P{formats}PPqqi", arguments, -(-m // _TILE) * -(-n // _TILE))
    return y


# --- checks ---------------------------------------------------------------------------------------------------------


def check_csr(x, values, col_indices, row_offsets, shape, check: bool) -> None:
    """Check CSR arrays against x, each other and the shape of W; with ``check`` every index too."""
    check_tensor("values", values, (x.dtype,), (None,))
    check_tensor("col_indices", col_indices, tuple(_spmm_sm80.INDICES), (values.numel(),))
    check_tensor("row_offsets", row_offsets, (torch.int32,), (shape[0] + 1,))
    check_same_device(x, values=values, col_indices=col_indices, row_offsets=row_offsets)
    check_pattern(col_indices, row_offsets, shape, check)


def check_pattern(col_indices, row_offsets, shape, check: bool) -> None:
    """The same without x and values."""
    n, k = shape
    check_tensor("col_indices", col_indices, tuple(_spmm_sm80.INDICES), (None,))
    check_tensor("row_offsets", row_offsets, (torch.int32,), (n + 1,))
    check_same_device(col_indices, row_offsets=row_offsets)
    check_count(col_indices.numel())
    if col_indices.dtype == torch.uint16 and k > _UINT16:
        raise ValueError(f"col_indices of uint16 reach {_UINT16} columns, but W has {k}")
    if check:
        _check_offsets(row_offsets, col_indices.numel())
        check_indices("col_indices", col_indices, k)


def check_count(nnz: int) -> None:
    """Raise ValueError for more entries than kernels can count."""
    if nnz > _MOST_ENTRIES:
        raise ValueError(f"W may have {_MOST_ENTRIES} entries at most, got {nnz}")


def check_plan(plan, col_indices, row_offsets, shape) -> None:
    """Raise unless ``plan`` is None or what ``spmm_csr.plan`` returned for these very arrays."""
    if plan is None:
        return
    if not isinstance(plan, _spmm_sm80.Plan):
        raise TypeError(f"plan must be what spmm_csr.plan returned, or None, got {kind_of(plan)}")
    if not plan.fits(col_indices, row_offsets, shape):
        raise ValueError("plan was made for other col_indices, row_offsets or another shape")


def _check_offsets(row_offsets, nnz: int) -> None:
    if int(row_offsets[0]) != 0 or int(row_offsets[-1]) != nnz:
        ends = int(row_offsets[0]), int(row_offsets[-1])
        raise ValueError(f"row_offsets must go from 0 to nnz = {nnz}, got {ends[0]} to {ends[1]}")
    falls = row_offsets[1:] < row_offsets[:-1]
    if bool(falls.any()):
        at = int(falls.nonzero()[0]) + 1
        raise ValueError(f"row_offsets[{at}] is {int(row_offsets[at])}, below row_offsets[{at - 1}]")


def check_indices(name: str, indices: torch.Tensor, size: int) -> None:
    """Raise ValueError naming the first index outside [0, size). On a GPU this waits for the device."""
    indices = indices.int() if indices.dtype == torch.uint16 else indices
    outside = (indices < 0) | (indices >= size)
    if bool(outside.any()):
        at = int(outside.nonzero()[0])
        raise ValueError(f"{name}[{at}] is {int(indices[at])}, outside [0, {size})")


def check_sizes(shape) -> tuple[int, int]:
    """``shape`` as two ints (N, K): TypeError for what are no whole numbers, ValueError for another count or range."""
    try:
        sizes = [_whole(size) for size in shape]
    except TypeError:
        raise TypeError(f"shape must be two whole numbers (N, K), got {shape!r}") from None
    if len(sizes) != 2 or min(sizes) < 0:
        raise ValueError(f"shape must be two sizes (N, K), neither below 0, got {shape!r}")
    if max(sizes) > _INT32:
        raise ValueError(f"shape {tuple(sizes)} does not fit int32 indices")
    return sizes[0], sizes[1]


def _whole(size) -> int:
    if isinstance(size, bool):
        raise TypeError
    return operator.index(size)


def check_shape(w_shape, k: int) -> int:
    """Check the shape of W by itself and against the width of x; returns N."""
    n, w_k = check_sizes(w_shape)
    if w_k != k:
        raise ValueError(f"shape must be (N, {k}) to fit x, got {(n, w_k)}")
    return n


# --- on a CPU -------------------------------------------------------------------------------------------------------


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
