"""The layer of entries: any weights of a row, each with its place in a tile, as tensor cores take them fastest."""

from __future__ import annotations

import torch

from qsparse import kernels
from qsparse.kernels import _entry_tiles, _spmm, _weight_tiles_sm80
from qsparse.kernels._face import check_dtype
from qsparse.nn._common import SparseStorage, check_sizes, check_tensors, describe


class EntryLinear(SparseStorage):
    """``y = act(x @ W.T + bias)`` with ``W (out_features, in_features)`` in tiles of entries, for inference.

    ``tiles`` and ``offsets`` are what ``kernels.spmm_entries`` calls entries and offsets: 4 bytes a stored weight of
    ``dtype``, float16 or bfloat16. ``x (..., K)``, ``bias (N,)`` and the output have that dtype; sums are held in
    float32. The arrays are checked when they are set by ``from_tiles`` or ``load_state_dict``, and not again at each
    call.
    """

    format = "entries"

    tiles: torch.Tensor
    offsets: torch.Tensor

    def __init__(
        self,
        in_features: int,
        out_features: int,
        entries: int,
        bias: bool = True,
        activation: str | None = None,
        *,
        dtype=torch.float16,
    ) -> None:
        """``entries``: how many are stored, what fills the tiles up among them: a multiple of 4."""
        check_sizes(in_features=in_features, out_features=out_features, entries=entries)
        check_dtype("dtype", dtype, _entry_tiles.DTYPES)
        tall, wide = _weight_tiles_sm80.grid((out_features, in_features))
        if entries % _weight_tiles_sm80.CHUNK or (entries and not tall * wide):
            raise ValueError(f"entries must be a multiple of 4, and 0 of no weights, got {entries}")
        buffers = {
            "tiles": torch.zeros(entries, dtype=torch.int32),
            "offsets": torch.zeros(tall * wide + 1, dtype=torch.int32),
        }
        buffers["offsets"][-1] = entries // _weight_tiles_sm80.CHUNK  # zeros, in the last tile
        super().__init__(in_features, out_features, bias, activation, dtype, **buffers)
        self.dtype = dtype

    @classmethod
    def from_tiles(cls, entries, offsets, *, shape, dtype, bias=None, activation=None) -> EntryLinear:
        """From the arguments of ``kernels.spmm_entries``, which are kept, not copied, and the dtype of the weights.

        TypeError for another dtype than float16 and bfloat16, ValueError for what does not fit.
        """
        check_tensors(entries=entries, offsets=offsets, **({} if bias is None else {"bias": bias}))
        n, k = _spmm.check_sizes(shape)
        layer = cls(k, n, 0, bias is not None, activation, dtype=dtype)
        return layer._holding(tiles=entries, offsets=offsets, bias=None if bias is None else bias.detach().to(dtype))

    def _apply(self, function, recurse: bool = True) -> EntryLinear:
        """As of any module; another dtype rounds the weights, whose bits PyTorch takes for whole numbers."""
        dtype = function(torch.empty(0, dtype=self.dtype)).dtype
        check_dtype("dtype", dtype, _entry_tiles.DTYPES)
        super()._apply(function, recurse)
        if dtype != self.dtype:
            self.tiles, self.dtype = _entry_tiles.rounded(self.tiles, self.dtype, dtype), dtype
        return self

    def _save_to_state_dict(self, destination, prefix: str, keep_vars: bool) -> None:
        super()._save_to_state_dict(destination, prefix, keep_vars)
        if (metadata := getattr(destination, "_metadata", None)) is not None:
            metadata[prefix[:-1]]["dtype"] = self.dtype

    def _load_from_state_dict(self, state_dict, prefix: str, local_metadata: dict, *others) -> None:
        """As of any module, weights of another dtype are rounded to the layer's, or make it theirs with ``assign``.

        What ``state_dict()`` returns says the dtype; of another dict, a bias of float16 or bfloat16 does; where neither
        does, weights are taken to have the layer's.
        """
        tiles, bias = (state_dict.get(prefix + name) for name in ("tiles", "bias"))
        *_, errors = others
        said, known = local_metadata.get("dtype"), _entry_tiles.DTYPES
        if isinstance(tiles, torch.Tensor) and tiles.dtype != torch.int32:
            errors.append(f"{prefix}tiles must be int32, got {tiles.dtype}")
            return
        if said not in (None, *known):
            errors.append(f"the dtype of {prefix}tiles must be one of {', '.join(map(str, known))}, got {said}")
            return
        if said is None and isinstance(bias, torch.Tensor) and bias.dtype in known:
            said = bias.dtype
        other = said not in (None, self.dtype)
        assign, before = local_metadata.get("assign_to_params_buffers"), self.tiles
        if other and not assign and isinstance(tiles, torch.Tensor):
            state_dict[prefix + "tiles"] = _entry_tiles.rounded(tiles, said, self.dtype)
        if isinstance(bias, torch.Tensor):
            state_dict[prefix + "bias"] = bias.detach()  # a buffer here, whatever it was
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *others)
        if other and assign and self.tiles is not before:  # not refused: they keep their dtype, and the bias follows
            self.dtype = said
        if self.bias is not None and self.bias.dtype != self.dtype:
            self.bias = self.bias.to(self.dtype)

    @property
    def _shape(self) -> tuple[int, int]:
        return self.out_features, self.in_features

    def check(self) -> None:
        """Raise ValueError unless entries and offsets fit each other and the layer."""
        _entry_tiles.check(self.tiles, self.offsets, self._shape)

    def _kept(self) -> torch.Tensor:
        """Where a weight is stored, (N, K) bool."""
        return _entry_tiles.stored(self.tiles, self.offsets, self._shape)

    @property
    def nnz(self) -> int:
        """Weights that are stored, without what fills the tiles up."""
        return int(self._kept().sum())

    def entries(self) -> tuple[torch.Tensor, torch.Tensor]:
        """The numbers that are stored, float32 (nnz,), and the column of each."""
        kept = self._kept()
        dense = _entry_tiles.unpack(self.tiles, self.offsets, self._shape, self.dtype)
        return dense[kept].float(), kept.nonzero()[:, 1]

    def _rows(self, x: torch.Tensor) -> torch.Tensor:
        check_dtype("x", x.dtype, (self.dtype,))  # the tiles have bits alone, which would be taken for others
        options = {"shape": self._shape, "relu": self.activation == "relu", "check": False}
        return kernels.spmm_entries(x, self.tiles, self.offsets, self.bias, **options)

    def cpu_kernel(self) -> str:
        return "spmm_entries:cpu"

    def describe(self) -> dict:
        return {**describe(self, self.dtype), "entries": self.tiles.numel()}
