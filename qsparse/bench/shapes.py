"""What is multiplied: M, N, K of the layers, and how the command line spells them. Imports no torch."""

from __future__ import annotations

from qsparse.errors import UserError

Shape = tuple[int, int, int]

LARGEST: Shape = (8192, 8192, 8192)
"""Where a device comes closest to its peak: the ceiling that the other shapes are compared with."""

DUEL: Shape = (4096, 4096, 4096)

GPU_SHAPES: tuple[Shape, ...] = (
    LARGEST,
    (4096, 4096, 4096),
    (4096, 14336, 4096),
    (60000, 1024, 784),
    (60000, 256, 784),
    (1024, 4096, 4096),
    (64, 4096, 4096),
    (16, 4096, 4096),
    (2048, 2048, 2048),
    (1024, 1024, 1024),
    (512, 512, 512),
    (256, 256, 256),
    (4096, 256, 784),
    (1024, 1024, 784),
    (256, 256, 784),
)

_LAYERS = ((256, 784), (10, 256), (1024, 784), (1024, 1024), (10, 1024), (4096, 784), (4096, 4096), (10, 4096))
_SPREAD: tuple[Shape, ...] = (
    *((1, 4096, 4096), (8, 256, 784), (16, 11008, 4096), (32, 512, 512), (64, 320, 784), (64, 1024, 16384)),
    *((64, 4096, 11008), (96, 1024, 1024), (100, 500, 784), (128, 10, 1024), (128, 256, 784), (200, 512, 512)),
    *((256, 256, 16384), (256, 1024, 1024), (256, 4096, 4096), (384, 3072, 768), (512, 784, 1024), (512, 2048, 2048)),
    *((700, 1024, 4096), (768, 768, 6144), (1000, 100, 784), (1024, 256, 784), (1024, 1024, 4096), (1024, 2048, 2048)),
    *((1500, 1024, 1024), (2000, 2000, 64), (2048, 1024, 784), (2048, 2048, 8192), (2048, 4096, 1024)),
    *((3000, 128, 128), (3000, 1024, 784), (3000, 2048, 2048), (4096, 10, 1024), (4096, 1024, 1024), (4096, 4096, 784)),
    *((5000, 784, 1024), (6000, 256, 784), (8192, 4096, 1024), (10000, 160, 320), (10000, 512, 512)),
    *((12000, 1024, 1024), (16384, 64, 64), (20000, 10, 256), (20000, 256, 784), (30000, 1024, 784)),
    *((60000, 128, 784), (60000, 320, 784), (60000, 784, 256)),
)
GPU_TUNED: tuple[Shape, ...] = tuple(
    dict.fromkeys((*GPU_SHAPES, *((m, n, k) for m in (1, 64, 512, 10_000) for n, k in _LAYERS), *_SPREAD))
)
"""What the tuning table is measured at: the benchmark's shapes, layers of the networks between them, and others of all
sizes, so that what a configuration costs at any shape lies between shapes where it was measured."""

CPU_SHAPES: tuple[Shape, ...] = (
    (2048, 2048, 2048),
    (1024, 1024, 1024),
    (512, 512, 512),
    (256, 256, 256),
    (4096, 256, 784),
    (1024, 1024, 784),
    (256, 256, 784),
    (64, 1024, 784),
    (1, 1024, 784),
)

GPU_QUANTIZED: tuple[tuple[int, int], ...] = ((60000, 784), (8192, 8192), (10000, 4096), (1024, 1024), (64, 784))
CPU_QUANTIZED: tuple[tuple[int, int], ...] = ((10000, 784), (1024, 1024), (64, 784))
"""Rows and columns of activations that are quantized."""

GPU_WEIGHT_ONLY: tuple[Shape, ...] = ((16, 8192, 8192), (1, 8192, 8192), (16, 16384, 16384), (1, 16384, 16384))
CPU_WEIGHT_ONLY: tuple[Shape, ...] = ((16, 1024, 1024), (1, 4096, 4096))
"""Few rows before large weights, which take longer to read than to multiply."""

GPU_SPARSE: tuple[Shape, ...] = (
    (4096, 4096, 4096),
    (512, 4096, 4096),
    (64, 4096, 4096),
    (8, 4096, 4096),
    (4096, 1024, 784),
    (256, 1024, 784),
    (60000, 256, 784),
)

CPU_SPARSE: tuple[Shape, ...] = ((1024, 1024, 784), (64, 1024, 784), (1, 1024, 784))


def parse_shape(text: str) -> Shape:
    """Turn "M,N,K" into three integers; UserError unless all three are there, from 1 to 2^31 - 1."""
    found = _integers(text)
    if len(found) != 3:
        raise UserError(
            f"--shapes {text!r} is no shape: give three integers from 1 to 2^31 - 1, M,N,K (batch rows, outputs, "
            "inputs), such as --shapes 4096,1024,784"
        )
    return found


def parse_sizes(text: str) -> tuple[int, ...]:
    """Turn "784,256,10" into a network's widths; UserError unless there are at least two, from 1 to 2^31 - 1."""
    found = _integers(text)
    if len(found) < 2:
        raise UserError(
            f"--network {text!r} is none: give at least two widths from 1 to 2^31 - 1, such as --network 784,256,10"
        )
    return found


def _integers(text: str) -> tuple[int, ...]:
    """The integers of "1,2,3", or none if it holds anything else, one below 1, or one that no int32 holds."""
    try:
        found = tuple(int(part) for part in text.replace("_", " ").split(","))  # int() would take "1_000"
    except ValueError:
        return ()
    return found if min(found) >= 1 and max(found) < 2**31 else ()
