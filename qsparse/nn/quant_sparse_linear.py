"""Both at once: int8 weights in CSR, activations quantized when they arrive."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.nn._common import by_rows, check_tensors, describe
from qsparse.nn.sparse_linear import SparseLinear

_UINT16 = 2**16


class QuantSparseLinear(SparseLinear):
    """``y = act(x @ W.T + bias)`` with W sparse and in int8, for inference.

    CSR: ``values (nnz,)`` int8, ``col_indices (nnz,)`` uint16 (int32 of more than 65,536 inputs), ``row_offsets``
    (N + 1,) int32. ``weight_scale (N,)`` float32, one an output: row n of W is ``weight_scale[n]`` times its values.
    Each row of ``x (..., K)`` (float32, float16 or bfloat16) gets its own scale, absmax / 127; one that holds NaN or
    Inf gives NaN. The output is float32.

    There is no int8 sparse kernel: ``spmm_csr`` multiplies the integers in float32. Its sums are exact as long as
    ``127 * sum |values|`` of a row of W stays within 2^24, always so up to 1,040 entries a row, and then the output has
    the bits of a ``QuantLinear`` of the same weights; beyond that they are rounded as any float32 sum.
    """

    weight_scale: torch.Tensor

    def __init__(
        self, in_features: int, out_features: int, nnz: int, bias: bool = True, activation: str | None = None
    ) -> None:
        super().__init__(in_features, out_features, nnz, "csr", bias, activation)
        self.values = torch.zeros(nnz, dtype=torch.int8)
        self.col_indices = torch.zeros(nnz, dtype=_index_dtype(in_features))
        self.register_buffer("weight_scale", torch.ones(out_features))

    @classmethod
    def from_integers(
        cls, values, col_indices, row_offsets, weight_scale, *, shape, bias=None, activation=None
    ) -> QuantSparseLinear:
        """From int8 ``values`` in CSR with scales (N,); ValueError for a bad index."""
        check_tensors(values=values, col_indices=col_indices, row_offsets=row_offsets, weight_scale=weight_scale)
        n, k = shape
        layer = cls(k, n, values.numel(), bias is not None, activation)
        arrays = {"values": values, "col_indices": col_indices.to(_index_dtype(k)), "row_offsets": row_offsets}
        bias = None if bias is None else bias.detach().float().clone()
        return layer._holding(**arrays, weight_scale=weight_scale, bias=bias)

    @property
    def activations(self) -> str:
        return "dynamic"

    def check(self) -> None:
        """Raise ValueError unless every index lies inside W."""
        self._pattern = None
        kernels.spmm_csr.plan(self.col_indices, self.row_offsets, shape=(self.out_features, self.in_features))

    def _reals(self) -> torch.Tensor:
        return self.values.float() * self.weight_scale.repeat_interleave(self.row_offsets.diff())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

    @torch.no_grad()
    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        q, scale = kernels.quantize_rows(x)
        pattern = self.pattern() if x.is_cuda and not torch.compiler.is_compiling() else None
        csr = self.values.float(), self.col_indices, self.row_offsets
        shape, plan = (self.out_features, self.in_features), None if pattern is None else pattern.plan
        y = kernels.spmm_csr(q.float(), *csr, shape=shape, check=False, plan=plan)
        y = y * scale[:, None] * self.weight_scale  # in QuantLinear's order, so that the bits are its bits
        y = y if self.bias is None else y + self.bias
        return y.relu() if self.activation == "relu" else y

    def make_trainable(self) -> SparseLinear:
        raise TypeError("int8 weights do not train: train the float32 layer before")

    def cpu_kernel(self) -> str:
        return "spmm_csr:cpu (int8 as float32)"

    def describe(self) -> dict:
        return {**describe(self), "nnz": self.nnz}


def _index_dtype(in_features: int) -> torch.dtype:
    return torch.uint16 if in_features <= _UINT16 else torch.int32
