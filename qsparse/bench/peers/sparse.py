"""What PyTorch offers for sparse weights on a GPU, cuSPARSE behind it, and the dense product beside it."""

from __future__ import annotations

import functools
import warnings

import torch
from torch import Tensor

from qsparse.bench.harness import Call
from qsparse.bench.peers.pytorch import blas

Csr = tuple[Tensor, Tensor, Tensor]  # values, column indices, row offsets


def products(x: Tensor, csr: Csr, shape: tuple[int, int]) -> dict[str, Call]:
    """`W @ X` with W in CSR and `X = x.T` row-major, as cuSPARSE wants it; the result turned back as a view."""
    xt = x.t().contiguous()
    w = _tensor(csr, shape)
    return {"torch_csr": Call(lambda: (w @ xt).t())}


def coo_products(x: Tensor, csr: Csr, rows: Tensor, shape: tuple[int, int]) -> dict[str, Call]:
    """The same with W in COO, sorted and without duplicates, and known to be so."""
    xt = x.t().contiguous()
    indices = torch.stack((rows, csr[1])).long()
    w = torch.sparse_coo_tensor(indices, csr[0], size=shape, is_coalesced=True, check_invariants=False)
    return {"torch_coo": Call(lambda: torch.sparse.mm(w, xt).t())}


def sampled_products(dy: Tensor, x: Tensor, csr: Csr, shape: tuple[int, int]) -> dict[str, Call]:
    """`dy.T @ x` at the entries of W."""
    w, dyt = _tensor(csr, shape), dy.t().contiguous()
    return {"torch.sparse.sampled_addmm": Call(lambda: torch.sparse.sampled_addmm(w, dyt, x, beta=0.0).values())}


def dense_products(x: Tensor, w: Tensor) -> dict[str, Call]:
    """`x @ W.T` with W dense: what pruning has to beat, in the same dtype and in float16."""
    calls = {"cublas": Call(functools.partial(torch.mm, x, w.t()), functools.partial(blas, "cublas"))}
    if x.dtype == torch.float32:
        x16, w16 = x.half(), w.half()
        calls["cublas_float16"] = Call(functools.partial(torch.mm, x16, w16.t()), functools.partial(blas, "cublas"))
    return calls


def _tensor(csr: Csr, shape: tuple[int, int]) -> Tensor:
    values, cols, offsets = csr
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # CSR is in beta
        return torch.sparse_csr_tensor(offsets, cols, values, size=shape, check_invariants=False)
