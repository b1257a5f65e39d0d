"""One dense layer and its mask -> the layer that stores what stays, in a format and a dtype."""

from __future__ import annotations

import copy
import functools

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.nn import (
    BitmapLinear,
    EntryLinear,
    Linear,
    QuantLinear,
    QuantSparseLinear,
    QuantTwoFourLinear,
    SparseLinear,
    TwoFourLinear,
)
from qsparse.quant.config import FLOAT32
from qsparse.quant.convert import to_half
from qsparse.quant.schemes import to_grid
from qsparse.sparse.bitmap_tiles import to_bitmap_tiles
from qsparse.sparse.config import INT8, STORED
from qsparse.sparse.entry_tiles import to_entry_tiles
from qsparse.sparse.formats import compress_24, to_coo, to_csr

DENSE = "dense"
BITS = 8
_TORCH = {FLOAT32: torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


def store(
    name: str, layer: Linear, mask: Tensor, format: str, dtype: str | None = None, scale: Tensor | None = None
) -> torch.nn.Module:
    """A layer that holds the weights of `layer` where `mask` (N, K) bool is True, no others. Shares nothing with it.

    Args:
        name: of the layer, for messages.
        layer: dense, finite; its own values elsewhere do not matter.
        format: of `STORED`, or "dense".
        dtype: "fp32", "fp16", "bf16", "int8", of what `STORED` allows; None: the format's own, of a layer in 16 bits
            that layer's (dense: the layer's).
        scale: of int8, (N,) float32, one an output; None: the largest of a row's weights that stay / 127. Biases then
            stay float32.

    Raises:
        UserError: a number that does not fit the dtype, naming the layer.
        ValueError: the format cannot hold the mask (2:4), or the mask has another shape.
    """
    mask = mask.to(layer.weight.device)
    if dtype == INT8:
        return _store_int8(layer, mask, format, scale)
    layer = _cast(name, layer, dtype or _own_dtype(layer, format))
    layer.weight.masked_fill_(~mask, 0.0)
    if format == DENSE:
        return layer
    bias = None if layer.bias is None else layer.bias.detach()
    options = {"shape": tuple(layer.weight.shape), "bias": bias, "activation": layer.activation}
    compress, build = {
        "csr": (to_csr, SparseLinear.from_csr),
        "coo": (to_coo, SparseLinear.from_coo),
        "2:4": (compress_24, TwoFourLinear.from_24),
        "bitmap": (to_bitmap_tiles, BitmapLinear.from_tiles),
        "entries": (to_entry_tiles, functools.partial(EntryLinear.from_tiles, dtype=layer.weight.dtype)),
    }[format]
    return build(*compress(layer.weight, mask), **options)


def _own_dtype(layer: Linear, format: str) -> str:
    """What `format` stores where nothing else is asked for."""
    own = next(name for name, dtype in _TORCH.items() if dtype == layer.weight.dtype)
    return own if format == DENSE or own != FLOAT32 else STORED[format][0]


def _cast(name: str, layer: Linear, dtype: str) -> Linear:
    """A copy of the layer, in "fp32", "fp16" or "bf16"."""
    cast = copy.deepcopy(layer).float() if dtype == FLOAT32 else to_half(name, layer, dtype)
    return cast.requires_grad_(False)


def scales(w: Tensor) -> Tensor:
    """One float32 scale an output, (N,), of `w` (N, K) in int8."""
    return kernels.quantize_rows(w.detach().float())[1]


def _store_int8(layer: Linear, mask: Tensor, format: str, scale: Tensor | None) -> torch.nn.Module:
    w = layer.weight.detach().float().masked_fill(~mask, 0.0)
    s = scales(w) if scale is None else scale
    q = to_grid(w, s[:, None], torch.zeros_like(s)[:, None], BITS).to(torch.int8)
    if format == DENSE:
        return QuantLinear.from_integers(q, s, layer.bias, layer.activation)
    options = {"shape": tuple(w.shape), "bias": layer.bias, "activation": layer.activation}
    if format == "2:4":
        return QuantTwoFourLinear.from_integers(*compress_24(q, mask), s, **options)
    return QuantSparseLinear.from_integers(*to_csr(q, mask), s, **options)
