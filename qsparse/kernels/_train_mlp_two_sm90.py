"""How ``train_mlp_two_sm90.cu`` is launched: small networks with two hidden layers, by one cluster."""

from __future__ import annotations

import functools
import itertools

from qsparse.kernels import _train_mlp_host as host
from qsparse.kernels._load import prepare

SOURCE = "train_mlp_two_sm90.cu"
INSTANCES = ("train_mlp_two_sm90",)
_INPUTS, _FIRST, _SECOND, _CLASSES, _BATCH = 784, 512, 160, 16, 64  # the largest that it takes; exactly so many inputs
_BLOCKS, _THREADS, _SHARED = 16, 512, 227 * 1024


def supports(images, parameters, velocities, mask, sizes: tuple[int, ...], batch: int, precision: str) -> bool:
    """Whether the kernel takes them: sizes, plain steps in precision "high", and arrays that start on 16 bytes."""
    if len(sizes) != 4 or precision != "high" or velocities is not None or mask is not None or batch > _BATCH:
        return False
    aligned = images.data_ptr() % 16 == 0 and parameters.data_ptr() % 16 == 0
    small = sizes[1] <= _FIRST and sizes[2] <= _SECOND and sizes[3] <= _CLASSES
    return aligned and sizes[0] == _INPUTS and small and len(images) < 2**31


@functools.cache
def fits(device: int, precision: str, momentum: bool) -> bool:
    """Whether the device forms clusters of so many blocks: a slice of a card may not."""
    return _prepare(device).fits()


def _prepare(device: int):
    return prepare(device, SOURCE, INSTANCES[0], "PPPPPPPPPPPiiiiiffif", _BLOCKS, _THREADS, _SHARED, cluster=_BLOCKS)


def launch(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    lengths = itertools.chain.from_iterable((n * k, n) for k, n in itertools.pairwise(sizes))
    offsets = itertools.accumulate(lengths, initial=0)
    pointers = [parameters.data_ptr() + 4 * at for at in itertools.islice(offsets, 6)]
    _prepare(images.device.index)(
        (
            *(value.data_ptr() for value in (images, labels, order, rates)),
            *pointers,
            losses.data_ptr(),
            *(len(order), batch, *sizes[1:], scale, shift, host.centre(scale, shift), options["weight_decay"]),
        )
    )
