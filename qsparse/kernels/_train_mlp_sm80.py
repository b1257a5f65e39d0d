"""How ``train_mlp_sm80.cu`` is launched: networks of any widths, by the whole grid."""

from __future__ import annotations

import functools
import itertools

import torch

from qsparse.kernels._load import multiprocessors, prepare
from qsparse.kernels._train_mlp_sm90 import PARTS, template

SOURCE = "train_mlp_sm80.cu"
_CLASSES = 16  # the most that it takes
_THREADS, _SHARED, _BLOCKS_EACH = 128, 48 * 1024, 2  # so many blocks on a multiprocessor


def instance(precision: str, momentum: bool) -> str:
    return f"train_mlp_sm80<{template(precision, momentum)}>"


INSTANCES = tuple(itertools.starmap(instance, itertools.product(PARTS, (False, True))))


def supports(parameters: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    return sizes[-1] <= _CLASSES and parameters.numel() < 2**31


def _line(width: int) -> int:
    """Halves in a line: one more column, in whole chunks of 16 bytes."""
    return (width + 8) // 8 * 8


@functools.cache  # for ever: a captured graph, or another stream, may still read the table
def _layers(sizes: tuple[int, ...], batch: int, parts: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """The kernel's table of layers, int64 (layers, 6) on the device, and the halves of scratch that they share."""
    table, params, scratch = [], 0, 0
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        row = [k, n, params]
        for halves in (n * _line(k), batch * _line(k) * (1 if i else 2), batch * _line(n)):
            row.append(scratch)
            scratch += parts * halves
        table.append(row)
        params += n * (k + 1)
    scratch += 8 * _line(max(sizes[:-1]))  # a tile of outputs reads up to so many lines beyond the weights, unused
    return torch.tensor(table, dtype=torch.int64, device=device), scratch


def launch(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    device = images.device
    batch = min(batch, len(order))
    layers, halves = _layers(sizes, batch, PARTS[precision], device)
    scratch = torch.zeros(halves, dtype=torch.float16, device=device)
    arrived = torch.zeros(1, dtype=torch.int32, device=device)
    prepared = prepare(
        device.index,
        SOURCE,
        instance(precision, velocities is not None),
        "PPPPPPPPPPPiiiffff",
        _BLOCKS_EACH * multiprocessors(device.index)[1],
        _THREADS,
        _SHARED,
        cooperative=True,
    )
    arrays = (images, labels, order, rates, parameters, velocities, mask, losses, layers, scratch, arrived)
    prepared(
        (
            *(0 if value is None else value.data_ptr() for value in arrays),
            *(len(sizes) - 1, len(order), batch, scale, shift, options["momentum"], options["weight_decay"]),
        )
    )
