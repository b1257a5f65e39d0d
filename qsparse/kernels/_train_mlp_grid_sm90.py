"""How ``train_mlp_grid_sm90.cu`` is launched: networks whose weights the whole grid holds in its shared memory."""

from __future__ import annotations

import functools
import itertools

from qsparse.kernels import _train_mlp_host as host
from qsparse.kernels._load import prepare

SOURCE, _KERNEL = "train_mlp_grid_sm90.cu", "train_mlp_grid_sm90"
INSTANCES = host.instances(_KERNEL)
_SPARE = 0  # columns of a line
_CLASSES = 16  # the most that it takes
_BLOCKS, _CLUSTER, _THREADS, _TILE = 128, 2, 256, 128  # a block owns a tile of so many weights each way
_LAYERS = 54  # the most that it takes
_STAGES, _WEIGHTS, _TABLE = 96 * 1024, 4 * _TILE * _TILE, 16 + 56 * _LAYERS  # bytes of shared memory
_HEAD_SUMS, _GROUP = 8 * 1024, 16
_BATCH = 1024  # the largest: beyond it the few blocks that own weights have too much to add up


def supports(images, parameters, velocities, mask, sizes: tuple[int, ...], batch: int, precision: str) -> bool:
    """Whether the blocks can hold the weights, each of them the head's, and are fastest."""
    layers = len(sizes) - 1
    if not 2 <= layers <= _LAYERS or mask is not None or sizes[-1] > _CLASSES or images.data_ptr() % 8:
        return False
    tiles = sum(-(-k // _TILE) * -(-n // _TILE) for k, n in itertools.pairwise(sizes))
    pitch = (host.line(sizes[-2], _SPARE) + 31) // 64 * 64 + 32
    head = _HEAD_SUMS + host.PARTS[precision] * 2 * _CLASSES * (24 + pitch)
    return batch <= _BATCH and tiles <= _BLOCKS and head <= _STAGES


@functools.cache
def fits(device: int, precision: str, momentum: bool) -> bool:
    """Whether the device runs so many clusters at once."""
    return _prepare(device, precision, momentum).fits()


def _prepare(device: int, precision: str, momentum: bool):
    return prepare(
        device,
        SOURCE,
        host.instance(_KERNEL, precision, momentum),
        "PPPPPPPPPPiiiffff",
        _BLOCKS,
        _THREADS,
        _STAGES + _WEIGHTS * (1 + momentum) + _TABLE,
        cluster=_CLUSTER,
        cooperative=True,
    )


def launch(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    batch = min(batch, len(order))
    prepared = _prepare(images.device.index, precision, velocities is not None)
    arrays = images, labels, order, rates, parameters, velocities, losses
    layers = host.layers(sizes, batch, host.PARTS[precision], _SPARE, _GROUP, images.device)
    host.launch_grid(prepared, arrays, *layers, len(order), batch, (scale, shift), options)
