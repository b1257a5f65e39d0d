"""`--format auto`: of all formats that hold what stays of a layer, and of dense storage, the one that costs least.

    bytes  what the layer stores, all arrays of it
    time   the median of its product with a batch of normal random numbers, on the device that the layer lies on, all
           formats timed in turn

Each format is taken with the dtype that it would have if it were asked for alone, or all with the dtype asked for.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qsparse.dense import dense_layers
from qsparse.models import MLP, input_dtype_of
from qsparse.nn import Linear, stored_bytes
from qsparse.sparse.config import AUTO, CRITERIA, STORED, check_stored, choose
from qsparse.sparse.masks import check_masks
from qsparse.sparse.store import DENSE, store
from qsparse.timing import graph_times, percentile, wall_times

_BUDGET_S = 0.05
"""Of timing, for each format of a layer, on a CPU."""
_REPETITIONS = 30
"""On a GPU."""

Costs = dict[str, float]
"""Format -> bytes, or microseconds."""


def choose_formats(
    model: MLP, masks: dict[str, Tensor], dtype: str | None = None, *, by: str = "bytes", batch: int = 1024
) -> tuple[dict[str, str], dict[str, Costs]]:
    """Layer name -> format, and layer name -> what each format costs; of equal costs the first of `STORED` is taken.

    Args:
        model: dense, on the device that is to be timed.
        masks: layer name -> bool (N, K), for every layer.
        dtype: "fp32", "fp16", "bf16" or "int8"; None: each format's own.
        by: "bytes" or "time".
        batch: rows of the product that is timed.

    Raises as `sparsify`, and ValueError for a batch that is no whole number from 1 on.
    """
    choose("criterion", by, CRITERIA)
    if dtype is not None:
        check_stored(AUTO, dtype)
    if isinstance(batch, bool) or not isinstance(batch, int) or batch < 1:
        raise ValueError(f"batch must be a whole number, at least 1, not {batch!r}")
    layers = dense_layers(model, "sparsify")
    check_masks(masks, layers)
    costs = {}
    for name, layer in layers.items():
        stored = _stored(name, layer, masks[name], dtype)
        by_bytes = {format: stored_bytes(each) for format, each in stored.items()}
        costs[name] = by_bytes if by == "bytes" else _times(stored, batch)
    return {name: min(each, key=lambda format, each=each: each[format]) for name, each in costs.items()}, costs


def _stored(name: str, layer: Linear, mask: Tensor, dtype: str | None) -> dict[str, torch.nn.Module]:
    """The layer in each format that holds it."""
    formats = [format for format, dtypes in STORED.items() if dtype is None or dtype in dtypes]
    found = {}
    for format in [*formats, DENSE]:
        if format == "2:4" and not _is_24(mask):
            continue
        found[format] = store(name, layer, mask, format, dtype)
    return found


def _is_24(mask: Tensor) -> bool:
    fours = torch.nn.functional.pad(mask, (0, -mask.shape[1] % 4)).reshape(len(mask), -1, 4)
    return not bool((fours.sum(dim=2) > 2).any())


@torch.inference_mode()
def _times(stored: dict[str, torch.nn.Module], batch: int) -> Costs:
    any_layer = next(iter(stored.values()))
    device = next(iter(any_layer.state_dict().values())).device
    generator = torch.Generator(device).manual_seed(0)
    x = torch.randn(batch, any_layer.in_features, generator=generator, device=device)
    calls = {format: functools.partial(layer, x.to(input_dtype_of(layer))) for format, layer in stored.items()}
    samples, _ = graph_times(calls, device, _REPETITIONS) if x.is_cuda else wall_times(calls, _BUDGET_S)
    return {format: round(percentile(each, 50), 3) for format, each in samples.items()}
