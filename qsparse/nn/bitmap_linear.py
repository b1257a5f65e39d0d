"""The bitmap layer: any weights of a row, a bit each and the kept ones packed, as tensor cores take them."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _bitmap_tiles
from qsparse.nn._common import SparseStorage, check_sizes, check_tensors, describe


class BitmapLinear(SparseStorage):
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
        check_sizes(in_features=in_features, out_features=out_features, values=values)
        tall, wide = _bitmap_tiles.grid((out_features, in_features))
        buffers = {
            "values": torch.zeros(values, dtype=dtype),
            "masks": torch.zeros(tall * wide, _bitmap_tiles.WORDS, dtype=torch.int32),
            "offsets": torch.zeros(tall * wide + 1, dtype=torch.int32),
        }
        super().__init__(in_features, out_features, bias, activation, dtype, **buffers)

    @classmethod
    def from_tiles(cls, values, masks, offsets, *, shape, bias=None, activation=None) -> BitmapLinear:
        """From the arguments of ``kernels.spmm_bitmap``, which are kept, not copied; ValueError if bad."""
        check_tensors(values=values, masks=masks, offsets=offsets)
        n, k = shape
        layer = cls(k, n, values.numel(), bias is not None, activation, dtype=values.dtype)
        bias = None if bias is None else bias.detach().to(values.dtype)
        return layer._holding(values=values, masks=masks, offsets=offsets, bias=bias)

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

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        stored = self.values, self.masks, self.offsets, self.bias
        return kernels.spmm_bitmap(x, *stored, shape=self._shape, relu=self.activation == "relu", check=False)

    def cpu_kernel(self) -> str:
        return "spmm_bitmap:cpu"

    def describe(self) -> dict:
        return {**describe(self, self.values.dtype), "values": self.values.numel()}
