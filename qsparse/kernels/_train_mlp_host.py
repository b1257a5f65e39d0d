"""What the hosts of the train_mlp kernels share: the names of instances, and how the whole grid is launched."""

from __future__ import annotations

import functools
import itertools

import torch

from qsparse.kernels._load import Launch

PARTS = {"highest": 2, "high": 1, "bfloat16": 1}
"""Halves that stand for a float."""


def instance(kernel: str, precision: str, momentum: bool) -> str:
    return f"{kernel}<{PARTS[precision]}, {str(momentum).lower()}{', __nv_bfloat16' * (precision == 'bfloat16')}>"


def instances(kernel: str) -> tuple[str, ...]:
    """All of a kernel, by precision and with or without velocities."""
    return tuple(instance(kernel, *each) for each in itertools.product(PARTS, (False, True)))


def centre(scale: float, shift: float) -> int:
    """The pixel that comes nearest to 0."""
    return min(max(round(-shift / scale), 0), 255) if scale else 0


def line(width: int, spare: int) -> int:
    """Halves in a line: so many columns more, in whole chunks of 16 bytes."""
    return (width + spare + 7) // 8 * 8


@functools.cache  # for ever: a captured graph, or another stream, may still read the table
def layers(
    sizes: tuple[int, ...], batch: int, parts: int, spare: int, group: int, device: torch.device
) -> tuple[torch.Tensor, int]:
    """The kernels' table of layers, int64 on the device, and the halves of scratch that they share.

    A layer's row says its inputs and outputs, the place of its parameters, and in scratch those of the weights' halves,
    its inputs', the gradient's by its outputs, all in lines with ``spare`` columns more, and, where ``group`` is not 0,
    of the gradient's sums, in float, over so many images each.
    """
    table, params, scratch = [], 0, 0
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        inputs, outputs = line(k, spare), line(n, spare)
        spaces = [parts * n * inputs, parts * batch * inputs * (1 if i else 2), parts * batch * outputs]
        if group:
            spaces.append(2 * -(-batch // group) * outputs)
        table.append([k, n, params, *itertools.accumulate(spaces[:-1], initial=scratch)])
        scratch += sum(spaces)
        params += n * (k + 1)
    scratch += 8 * line(
        max(sizes[:-1]), spare
    )  # a tile of outputs reads up to so many lines beyond the weights, unused
    return torch.tensor(table, dtype=torch.int64, device=device), scratch


def launch_grid(
    prepared: Launch,
    arrays: tuple,
    table: torch.Tensor,
    halves: int,
    rows: int,
    batch: int,
    pixels: tuple,
    options: dict,
) -> None:
    """Launch a kernel of the whole grid with ``arrays``, tensors or None, and what ``layers`` gave for its network.

    ``pixels`` are scale and shift, ``options`` momentum and weight decay.
    """
    scratch = torch.zeros(halves, dtype=torch.float16, device=table.device)
    arrived = torch.zeros(1, dtype=torch.int32, device=table.device)
    pointers = (0 if value is None else value.data_ptr() for value in (*arrays, table, scratch, arrived))
    prepared((*pointers, len(table), rows, batch, *pixels, options["momentum"], options["weight_decay"]))
