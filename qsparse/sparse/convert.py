"""Dense model and masks -> a model that stores and computes what the masks keep."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from qsparse.dense import dense_layers
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear
from qsparse.sparse.choose import Costs, choose_formats
from qsparse.sparse.config import AUTO, FORMATS, INT8, STORED, SparseConfig, check_stored, choose
from qsparse.sparse.masks import check_masks
from qsparse.sparse.store import store


def prunable_weights(model: MLP) -> dict[str, Tensor]:
    """Layer name -> weight (N, K) of every layer of a dense `model`, in order. Biases are never pruned.

    Raises:
        UserError: a layer is already compressed, or holds NaN or Inf; the message names it.
    """
    return {name: layer.weight.detach() for name, layer in dense_layers(model, "sparsify").items()}


def sparsify(
    model: MLP,
    masks: dict[str, Tensor],
    format: str | Mapping[str, str] = "csr",
    dtype: str | None = None,
    *,
    scales: Mapping[str, Tensor] | None = None,
) -> MLP:
    """A copy of `model` that stores the weights where `masks` are True, and nothing of the others.

    Args:
        model: dense; its own values at the masked-out places do not matter. Left as it was.
        masks: layer name -> bool (N, K), for every layer (as from `magnitude_masks`).
        format: "csr", "coo", "2:4", "bitmap", "entries", or "auto", what takes the fewest bytes of these and of
            "dense" for each layer; or layer name -> format (as from `choose_formats`).
        dtype: of the values, "fp32", "fp16", "bf16" or "int8", of what the format stores; None: its own.
        scales: of int8, layer name -> (N,) float32, above 0, for every layer; None: of what stays.

    Raises:
        UserError: an unknown format, one that does not store `dtype`, a number that does not fit it, a model that is
            already compressed or holds NaN or Inf.
        ValueError: the names or shapes of the masks or the scales are not the layers', one is not 2:4 where that is
            asked, a scale is none, or there are scales of another dtype than int8.
        TypeError: a mask is not bool, scales are not float32, `format` is neither a name nor a dict.
    """
    layers = dense_layers(model, "sparsify")
    check_masks(masks, layers)
    if scales is not None:
        _check_scales(scales, layers, dtype)
    if isinstance(format, str):
        choose("format", format, FORMATS)
        if dtype is not None:
            check_stored(format, dtype)
        every = choose_formats(model, masks, dtype)[0] if format == AUTO else dict.fromkeys(layers, format)
    else:
        if not isinstance(format, Mapping):
            raise TypeError(f"format must be a name, or a dict from a layer's name to one, not {type(format).__name__}")
        every = dict(format)
        if every.keys() != layers.keys():
            raise UserError(f"formats are for {', '.join(every)}; the layers are {', '.join(layers)}")
        for each in every.values():
            choose("format", each, (*STORED, "dense"))
            if dtype is not None and each != "dense":
                check_stored(each, dtype)
    return model.replace(
        {
            name: store(name, layer, masks[name], every[name], dtype, scales and scales[name])
            for name, layer in layers.items()
        }
    )


def _check_scales(scales: object, layers: Mapping[str, Linear], dtype: str | None) -> None:
    """Raise TypeError or ValueError unless `scales` is layer name -> (N,) float32 of numbers above 0, of int8."""
    if dtype != INT8:
        raise ValueError(f"scales are of the dtype int8, not of {dtype}: leave them out")
    if not isinstance(scales, Mapping):
        raise TypeError(f"scales must be a dict from a layer's name to a tensor, not {type(scales).__name__}")
    if scales.keys() != layers.keys():
        raise ValueError(
            f"scales must name the layers {', '.join(layers)}, not {', '.join(map(str, scales)) or 'none'}"
        )
    for name, layer in layers.items():
        scale = scales[name]
        if not isinstance(scale, Tensor) or scale.dtype != torch.float32:
            kind = scale.dtype if isinstance(scale, Tensor) else type(scale).__name__
            raise TypeError(f"the scales of layer {name} must be float32, a torch.Tensor, not {kind}")
        if scale.shape != layer.weight.shape[:1]:
            raise ValueError(
                f"layer {name} has {len(layer.weight)} outputs and takes as many scales, not {tuple(scale.shape)}"
            )
        if not bool(((scale > 0) & scale.isfinite()).all()):
            raise ValueError(f"the scales of layer {name} must be above 0 and finite")


def sparsify_as(
    config: SparseConfig, model: MLP, masks: dict[str, Tensor], scales: Mapping[str, Tensor] | None = None
) -> tuple[MLP, dict[str, Costs] | None]:
    """`sparsify` with the format and the dtype of `config`; and, of "auto", what each format cost each layer."""
    if config.format != AUTO:
        return sparsify(model, masks, config.format, config.dtype, scales=scales), None
    formats, costs = choose_formats(model, masks, config.dtype, by=config.auto, batch=config.auto_batch)
    return sparsify(model, masks, formats, config.dtype, scales=scales), costs
