"""The 2:4 layer: two weights of every four neighbours in a row, as the sparse tensor cores multiply them."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _two_four
from qsparse.nn._common import SparseStorage, check_sizes, check_tensors, describe

_FIRST_TWO = 0x44
"""Metadata of two groups that keep their columns 0 and 1."""


class TwoFourLinear(SparseStorage):
    """``y = act(x @ W.T + bias)`` with ``W (out_features, in_features)`` in 2:4 storage, for inference.

    ``values (N, Kp / 2)`` float16, bfloat16 or float32 and ``metadata (N, Kp / 8)`` uint8 are as ``kernels.gemm_24``
    takes them, Kp being in_features rounded up to a multiple of 8. ``x (..., K)``, ``bias (N,)`` and the output have
    the values' dtype; sums are held in float32. Metadata are checked when they are set by ``from_24`` or
    ``load_state_dict``.
    """

    format = "2:4"

    values: torch.Tensor
    metadata: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        *,
        dtype=torch.float16,
    ) -> None:
        check_sizes(in_features=in_features, out_features=out_features)
        width = _two_four.padded(in_features)
        values = torch.zeros(out_features, width // 2, dtype=dtype)
        metadata = torch.full((out_features, width // 8), _FIRST_TWO, dtype=torch.uint8)
        super().__init__(in_features, out_features, bias, activation, dtype, values=values, metadata=metadata)

    @classmethod
    def from_24(cls, values, metadata, *, shape, bias=None, activation=None) -> TwoFourLinear:
        """From the arguments of ``kernels.gemm_24``, which are kept, not copied; ValueError for bad metadata."""
        check_tensors(values=values, metadata=metadata)
        n, k = shape
        layer = cls(k, n, bias is not None, activation, dtype=values.dtype)
        bias = None if bias is None else bias.detach().to(values.dtype)
        return layer._holding(values=values, metadata=metadata, bias=bias)

    def check(self) -> None:
        """Raise ValueError unless the two columns of each group ascend, and what lies beyond W is zero."""
        columns = _two_four.columns(self.metadata)
        if bool((columns[..., 0] >= columns[..., 1]).any()):
            raise ValueError("metadata must name two columns of each group, the lower one first")
        if bool((self.values[self._columns() >= self.in_features] != 0).any()):
            raise ValueError(f"values beyond column {self.in_features} must be zero")

    def _columns(self) -> torch.Tensor:
        """The column of W of each value, (N, Kp / 2) int64."""
        columns = _two_four.columns(self.metadata)
        first = 4 * torch.arange(columns.shape[1], device=columns.device)
        return (columns + first[:, None]).flatten(1)

    @property
    def nnz(self) -> int:
        """Weights that stay: what is stored and not zero. Groups that keep fewer than two are filled up with zeros."""
        return int(self.values.count_nonzero())

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that stay, float32 (nnz,), and the column of each."""
        stay = self.values != 0
        return self._reals()[stay], self._columns()[stay]

    def _reals(self) -> torch.Tensor:
        return self.values.float()

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.gemm_24(x, self.values, self.metadata, self.bias, relu=self.activation == "relu")

    def cpu_kernel(self) -> str:
        return "gemm_24:cpu"

    def describe(self) -> dict:
        return describe(self, self.values.dtype)
