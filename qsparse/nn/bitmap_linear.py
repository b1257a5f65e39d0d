"""The bitmap layer: any weights of a row, a bit each and the kept ones packed, as tensor cores take them."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _bitmap_tiles
from qsparse.nn._common import DTYPES, by_rows, check_activation


class BitmapLinear(torch.nn.Module):
    """``y = act(x @ W.T + bias)`` with ``W (out_features, in_features)`` in bitmap tiles, for inference.

    ``values``, ``masks`` and ``offsets`` are as ``kernels.spmm_bitmap`` takes them: float16, bfloat16 or float32,
    and about one bit a weight beside them. ``x (..., K)``, ``bias (N,)`` and the output have the values' dtype; sums
    are held in float32. The arrays are checked when they are set by ``from_tiles`` or ``load_state_dict``, and not
    again at each call.
    """

    format = "bitmap"

    values: torch.Tensor
    masks: torch.Tensor
    offsets: torch.Tensor
    bias: torch.Tensor | None

    def __init__(
        self,
        in_features: int,
        out_features: int,
        values: int,
        bias: bool = True,
        activation: str | None = None,
        *,
        dtype=torch.float16,
    ) -> None:
        """``values``: how many are stored, the padding of the tiles among them."""
        check_activation(activation)
        super().__init__()
        self.in_features, self.out_features, self.activation = in_features, out_features, activation
        tall, wide = _bitmap_tiles.grid((out_features, in_features))
        self.register_buffer("values", torch.zeros(values, dtype=dtype))
        self.register_buffer("masks", torch.zeros(tall * wide, _bitmap_tiles.WORDS, dtype=torch.int32))
        self.register_buffer("offsets", torch.zeros(tall * wide + 1, dtype=torch.int32))
        self.register_buffer("bias", torch.zeros(out_features, dtype=dtype) if bias else None)
        self.register_load_state_dict_post_hook(lambda layer, _: layer.check())

    @classmethod
    def from_tiles(cls, values, masks, offsets, *, shape, bias=None, activation=None) -> BitmapLinear:
        """From the arguments of ``kernels.spmm_bitmap``, which are kept, not copied; ValueError if bad."""
        n, k = shape
        layer = cls(k, n, values.numel(), bias is not None, activation, dtype=values.dtype)
        layer.values, layer.masks, layer.offsets = values, masks, offsets
        layer.bias = None if bias is None else bias.detach().to(values.dtype)
        layer.check()
        return layer

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def check(self) -> None:
        """Raise ValueError unless offsets, masks and values fit each other."""
        _bitmap_tiles.check(self.values, self.masks, self.offsets, self._shape)

    def _kept(self) -> torch.Tensor:
        """Where a weight is stored, (N, K) bool."""
        return _bitmap_tiles.unpack(torch.ones_like(self.values), self.masks, self.offsets, self._shape).bool()

    @property
    def nnz(self) -> int:
        """Weights that are stored, without the padding."""
        return int(self._kept().sum())

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that are stored, float32 (nnz,), and the column of each."""
        kept = self._kept()
        dense = _bitmap_tiles.unpack(self.values, self.masks, self.offsets, self._shape)
        return dense[kept].float(), kept.nonzero()[:, 1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return by_rows(x, self._rows)

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        stored = self.values, self.masks, self.offsets, self.bias
        return kernels.spmm_bitmap(x, *stored, shape=self._shape, relu=self.activation == "relu", check=False)

    def cpu_kernel(self) -> str:
        return "spmm_bitmap:cpu"

    def describe(self) -> dict:
        return {
            "kind": "BitmapLinear",
            "in_features": self.in_features,
            "out_features": self.out_features,
            "values": self.values.numel(),
            "bias": self.bias is not None,
            "activation": self.activation,
            "dtype": str(self.values.dtype).removeprefix("torch."),
        }

    @classmethod
    def from_description(cls, options: dict) -> BitmapLinear:
        return cls(**{**options, "dtype": DTYPES[options["dtype"]]})
