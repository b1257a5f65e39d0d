"""How ``train_mlp_sm90.cu`` is launched: small networks whose weights stay in one cluster's registers."""

from __future__ import annotations

import functools

from qsparse.kernels import _train_mlp_host as host
from qsparse.kernels._load import prepare

SOURCE, _KERNEL = "train_mlp_sm90.cu", "train_mlp_sm90"
INSTANCES = host.instances(_KERNEL)
_INPUTS, _HIDDEN, _CLASSES, _BATCH = 784, 256, 16, 64  # the largest that it takes; exactly so many inputs
_BLOCKS, _THREADS, _SHARED = 16, 256, 200 * 1024


def supports(images, parameters, velocities, mask, sizes: tuple[int, ...], batch: int, precision: str) -> bool:
    """Whether the kernel takes them: sizes, and arrays that start on 16 bytes."""
    if len(sizes) != 3 or mask is not None or batch > _BATCH:
        return False
    aligned = all(value is None or value.data_ptr() % 16 == 0 for value in (images, parameters, velocities))
    return aligned and sizes[0] == _INPUTS and sizes[1] <= _HIDDEN and sizes[2] <= _CLASSES


@functools.cache
def fits(device: int, precision: str, momentum: bool) -> bool:
    """Whether the device forms clusters of so many blocks: a slice of a card may not."""
    return _prepare(device, precision, momentum).fits()


def _prepare(device: int, precision: str, momentum: bool):
    return prepare(
        device,
        SOURCE,
        host.instance(_KERNEL, precision, momentum),
        "PPPPPPPPPPPPPiiiiffiff",
        _BLOCKS,
        _THREADS,
        _SHARED,
        cluster=_BLOCKS,
    )


def launch(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    inputs, hidden, classes = sizes
    offsets = (0, hidden * inputs, hidden * (inputs + 1), hidden * (inputs + 1) + classes * hidden)
    pointers = [parameters.data_ptr() + 4 * at for at in offsets]
    pointers += [0 if velocities is None else velocities.data_ptr() + 4 * at for at in offsets]
    prepared = _prepare(images.device.index, precision, velocities is not None)
    prepared(
        (
            *(value.data_ptr() for value in (images, labels, order, rates)),
            *pointers,
            losses.data_ptr(),
            *(len(order), batch, hidden, classes, scale, shift, host.centre(scale, shift)),
            *(options["momentum"], options["weight_decay"]),
        )
    )
