"""How ``train_mlp_grid_sm90.cu`` is launched: networks whose weights the whole grid holds in its shared memory."""

from __future__ import annotations

import functools
import itertools

import torch

from qsparse.kernels._load import prepare
from qsparse.kernels._train_mlp_sm90 import PARTS, template

SOURCE = "train_mlp_grid_sm90.cu"
_CLASSES = 16  # the most that it takes
_BLOCKS, _CLUSTER, _THREADS, _TILE = 128, 2, 256, 128  # a block owns a tile of so many weights each way
_LAYERS = 54  # the most that it takes
_STAGES, _WEIGHTS, _TABLE = 96 * 1024, 4 * _TILE * _TILE, 16 + 56 * _LAYERS  # bytes of shared memory
_HEAD_SUMS, _GROUP = 8 * 1024, 16
_BATCH = 1024  # the largest: beyond it the few blocks that own weights have too much to add up


def instance(precision: str, momentum: bool) -> str:
    return f"train_mlp_grid_sm90<{template(precision, momentum)}>"


INSTANCES = tuple(itertools.starmap(instance, itertools.product(PARTS, (False, True))))


def supports(images, parameters, velocities, mask, sizes: tuple[int, ...], batch: int, precision: str) -> bool:
    """Whether the blocks can hold the weights, each of them the head's, and are fastest."""
    layers = len(sizes) - 1
    if not 2 <= layers <= _LAYERS or mask is not None or sizes[-1] > _CLASSES or images.data_ptr() % 8:
        return False
    tiles = sum(-(-k // _TILE) * -(-n // _TILE) for k, n in itertools.pairwise(sizes))
    head = _HEAD_SUMS + PARTS[precision] * 2 * _CLASSES * (24 + (_line(sizes[-2]) + 31) // 64 * 64 + 32)
    return batch <= _BATCH and tiles <= _BLOCKS and head <= _STAGES


@functools.cache
def fits(device: int, precision: str, momentum: bool) -> bool:
    """Whether the device runs so many clusters at once."""
    return _prepare(device, precision, momentum).fits()


def _prepare(device: int, precision: str, momentum: bool):
    return prepare(
        device,
        SOURCE,
        instance(precision, momentum),
        "PPPPPPPPPPiiiffff",
        _BLOCKS,
        _THREADS,
        _STAGES + _WEIGHTS * (1 + momentum) + _TABLE,
        cluster=_CLUSTER,
        cooperative=True,
    )


def _line(width: int) -> int:
    """Halves in a line: whole chunks of 16 bytes."""
    return (width + 7) // 8 * 8


@functools.cache  # for ever: a captured graph, or another stream, may still read the table
def _layers(sizes: tuple[int, ...], batch: int, parts: int, device: torch.device) -> tuple[torch.Tensor, int]:
    """The kernel's table of layers, int64 (layers, 7) on the device, and the halves of scratch that they share."""
    table, params, scratch = [], 0, 0
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        row = [k, n, params]
        for halves in (n * _line(k), batch * _line(k) * (1 if i else 2), batch * _line(n)):
            row.append(scratch)
            scratch += parts * halves
        row.append(scratch)
        scratch += 2 * -(-batch // _GROUP) * _line(n)  # floats
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
    arrays = (images, labels, order, rates, parameters, velocities, losses, layers, scratch, arrived)
    _prepare(device.index, precision, velocities is not None)(
        (
            *(0 if value is None else value.data_ptr() for value in arrays),
            *(len(sizes) - 1, len(order), batch, scale, shift, options["momentum"], options["weight_decay"]),
        )
    )
