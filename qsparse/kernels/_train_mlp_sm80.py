"""How ``train_mlp_sm80.cu`` is launched: networks of any widths, by the whole grid."""

from __future__ import annotations

import torch

from qsparse.kernels import _train_mlp_host as host
from qsparse.kernels._load import multiprocessors, prepare

SOURCE, _KERNEL = "train_mlp_sm80.cu", "train_mlp_sm80"
INSTANCES = host.instances(_KERNEL)
SPARE = 1  # columns of a line: for the biases
_CLASSES = 16  # the most that it takes
_THREADS, _SHARED, _BLOCKS_EACH = 128, 48 * 1024, 2  # so many blocks on a multiprocessor


def supports(parameters: torch.Tensor, sizes: tuple[int, ...]) -> bool:
    return sizes[-1] <= _CLASSES and parameters.numel() < 2**31


def launch(
    images, labels, order, rates, parameters, velocities, mask, losses, sizes, batch, scale, shift, options, precision
) -> None:
    device = images.device
    batch = min(batch, len(order))
    prepared = prepare(
        device.index,
        SOURCE,
        host.instance(_KERNEL, precision, velocities is not None),
        "PPPPPPPPPPPiiiffff",
        _BLOCKS_EACH * multiprocessors(device.index)[1],
        _THREADS,
        _SHARED,
        cooperative=True,
    )
    arrays = images, labels, order, rates, parameters, velocities, mask, losses
    layers = host.layers(sizes, batch, host.PARTS[precision], SPARE, 0, device)
    host.launch_grid(prepared, arrays, *layers, len(order), batch, (scale, shift), options)
