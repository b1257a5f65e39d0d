"""The weight-only layer (W8A16, W4A16): weights stored in int8 or int4, activations left in floats."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels._face import check_count
from qsparse.kernels.gemm_weight_only import pack_int4, spread_groups
from qsparse.nn._common import check_tensors, describe
from qsparse.nn._quantized import QuantizedLinear

_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny


class WeightOnlyLinear(QuantizedLinear):
    """``y = act(x @ W.T + bias)`` with ``W = scale * q`` stored as integers, for inference.

    ``weight`` holds q: int8 (N, K), or with ``bits=4`` uint8 (N, ceil(K / 2)), two to a byte as
    ``kernels.gemm_weight_only`` takes them. ``weight_scale`` float32 is (N,), or with ``group`` (N, ceil(K / group)).
    ``x (..., K)``, ``bias (N,)`` and the output have ``dtype``; sums are held in float32.
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        activation: str | None = None,
        bits: int = 8,
        group: int | None = None,
        *,
        dtype=torch.float16,
    ):
        super().__init__(in_features, out_features, bias, activation, torch.int8, dtype)
        _check(bits, group)
        self.bits, self.group, self.dtype = bits, group, dtype
        if bits == 4:
            self.weight = pack_int4(self.weight)
        if group is not None:
            self.weight_scale = torch.ones(out_features, -(-in_features // group))

    @classmethod
    def from_linear(cls, linear, bits: int = 8, group: int | None = None, dtype=torch.float16) -> WeightOnlyLinear:
        """Round a dense layer's weights to the nearest; the dense layer is not changed.

        Symmetric: integers up to ``limit = 2^(bits - 1) - 1`` and, for each channel or group, the scale
        ``absmax / limit`` (1 where that would be below the smallest normal float32).
        """
        _check(bits, group)
        weight, limit = linear.weight.detach().float(), 2 ** (bits - 1) - 1
        parts = weight.split(group or weight.shape[1], dim=1) if weight.shape[1] else [weight.new_zeros(len(weight), 1)]
        scale = torch.stack([part.abs().amax(1) for part in parts], dim=1) / limit
        scale[scale < _SMALLEST_NORMAL] = 1
        scale = scale.reshape(-1) if group is None else scale[:, : weight.shape[1]]
        q = (weight / spread_groups(scale, group, weight.shape[1])).round().clamp(-limit, limit)
        return cls.from_integers(q.nan_to_num(0), scale, linear.bias, linear.activation, bits, group, dtype)

    @classmethod
    def from_integers(
        cls, q, scale, bias=None, activation=None, bits: int = 8, group: int | None = None, dtype=torch.float16
    ) -> WeightOnlyLinear:
        """A layer of weights rounded already: integers (N, K) of any dtype, scales (N,) or (N, ceil(K / group))."""
        check_tensors(q=q, scale=scale)
        n, k = q.shape
        layer = cls(k, n, bias is not None, activation, bits, group, dtype=dtype)
        layer.weight = q.to(torch.int8).contiguous() if bits == 8 else pack_int4(q)
        layer.weight_scale = scale.detach().float().contiguous()
        if bias is not None:
            layer.bias = bias.detach().to(dtype, copy=True)
        return layer

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        options = {"group": self.group, "relu": self.activation == "relu"}
        return kernels.gemm_weight_only(x, self.weight, self.weight_scale, self.bias, **options)

    def cpu_kernel(self) -> str:
        return "gemm_weight_only:cpu"

    def describe(self) -> dict:
        return {**describe(self, self.dtype), "bits": self.bits, "group": self.group}


def _check(bits: int, group: int | None) -> None:
    if bits not in (4, 8):
        raise ValueError(f"bits must be 4 or 8, got {bits!r}")
    if group is not None:
        check_count("group", group)
