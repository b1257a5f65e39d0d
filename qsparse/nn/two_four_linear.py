"""The 2:4 layer: two weights of every four neighbours in a row, as the sparse tensor cores multiply them."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _two_four
from qsparse.nn._common import DTYPES, by_rows, check_activation

_FIRST_TWO = 0x44
"""Metadata of two groups that keep their columns 0 and 1."""


class TwoFourLinear(torch.nn.Module):
    """``y = act(x @ W.T + bias)`` with ``W (out_features, in_features)`` in 2:4 storage, for inference.

    ``values (N, Kp / 2)`` float16, bfloat16 or float32 and ``metadata (N, Kp / 8)`` uint8 are as ``kernels.gemm_24``
    takes them, Kp being in_features rounded up to a multiple of 8. ``x (..., K)``, ``bias (N,)`` and the output have
    the values' dtype; sums are held in float32. Metadata are checked when they are set by ``from_24`` or
    ``load_state_dict``.
    """

    format = "2:4"

    values: torch.Tensor
    metadata: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        *,
        dtype=torch.float16,
    ) -> None:
        check_activation(activation)
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        width = _two_four.padded(in_features)
        self.register_buffer("values", torch.zeros(out_features, width // 2, dtype=dtype))
        self.register_buffer("metadata", torch.full((out_features, width // 8), _FIRST_TWO, dtype=torch.uint8))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)
        self.register_load_state_dict_post_hook(lambda layer, _: layer.check())

    @classmethod
    def from_24(cls, values, metadata, *, shape, bias=None, activation=None) -> TwoFourLinear:
        """From the arguments of ``kernels.gemm_24``, which are kept, not copied; ValueError for bad metadata."""
        n, k = shape
        layer = cls(k, n, bias is not None, activation, dtype=values.dtype)
        layer.values, layer.metadata = values, metadata
        layer.bias = None if bias is None else bias.detach().to(values.dtype)
        layer.check()
        return layer

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

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        return kernels.gemm_24(x, self.values, self.metadata, self.bias, relu=self.activation == "relu")

    def cpu_kernel(self) -> str:
        return "gemm_24:cpu"

    def describe(self) -> dict:
        return {
            "kind": "TwoFourLinear",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "bias": self.bias is not None,
            "activation": self.activation,
            "dtype": str(self.values.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_description(cls, options: dict) -> TwoFourLinear:
        return cls(**{**options, "dtype": DTYPES[options["dtype"]]})
