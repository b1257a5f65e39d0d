"""Where the entries of a sparse layer are: plans for the kernels, and the transposed matrix's order of the entries."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qsparse import kernels


class Pattern:
    """The pattern of ``W (N, K)``: CSR indices ``cols``, ``offsets``, and the ``plan`` of the forward product.

    Made of CSR indices ``(col_indices, row_offsets)`` or COO ones ``(rows, cols)``, ascending by row. Values may
    change, the pattern may not. What only a backward pass needs is found when it is first asked for.
    """

    def __init__(self, format: str, indices: tuple[torch.Tensor, torch.Tensor], shape: tuple[int, int]):
        self._indices, self.shape = indices, shape
        if format == "csr":
            self.cols, self.offsets = indices
        else:
            self.cols, self.offsets = indices[1], _offsets(indices[0], shape[0])
        self.plan = kernels.spmm_csr.plan(self.cols, self.offsets, shape=shape)

    def of(self, indices: tuple[torch.Tensor, torch.Tensor]) -> bool:
        """Whether this is the pattern of these very arrays."""
        return all(mine is theirs for mine, theirs in zip(self._indices, indices, strict=True))

    @functools.cached_property
    def transposed(self) -> _Transposed:
        n, k = self.shape
        rows = torch.repeat_interleave(torch.arange(n, device=self.cols.device), self.offsets.diff())
        cols, order = torch.sort(self.cols.int(), stable=True)  # rows ascend within a column
        cols_of_w, offsets = rows[order].int(), _offsets(cols, k)
        found = _Transposed(order, cols_of_w, offsets, kernels.spmm_csr.plan(cols_of_w, offsets, shape=(k, n)))
        if cols.is_cuda:
            torch.cuda.current_stream(cols.device).synchronize()  # it is there for every stream
        return found

    def times(self, dz: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
        """``dz (M, N) @ W``, (M, K): the gradient of the layer's input."""
        t = self.transposed
        options = {"shape": self.shape[::-1], "check": False, "plan": t.plan}
        return kernels.spmm_csr(dz, values[t.order], t.cols, t.offsets, **options)

    def sample(self, dz: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
        """``dz.T @ x`` at the entries, (nnz,): the gradient of the values."""
        return kernels.sddmm(dz, x, self.cols, self.offsets, check=False, plan=self.plan)


@dataclass(frozen=True)
class _Transposed:
    """CSR of the transpose: its entries are ``values[order]``."""

    order: torch.Tensor
    cols: torch.Tensor
    offsets: torch.Tensor
    plan: object


def _offsets(rows: torch.Tensor, n: int) -> torch.Tensor:
    """CSR offsets of ascending rows."""
    return torch.searchsorted(rows, torch.arange(n + 1, dtype=rows.dtype, device=rows.device)).int()
