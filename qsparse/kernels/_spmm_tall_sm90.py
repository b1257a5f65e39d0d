"""The host side of ``spmm_csr_tall_sm90.cu``: the product in float32 on Hopper, for many batch rows and few rows of W.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch

from qsparse.kernels._load import following, launch, multiprocessors, prepare, tensor_map

SOURCE = "spmm_csr_tall_sm90.cu"
MOST_ROWS = 576  # of W; with more, it pays to turn x beforehand
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_GROUP, _BATCH, _WIDTH, _CONSUMERS, _WARPS, _ORDER_BLOCK = 12, 256, 64, 12, 16, 256
_STAGES, _LEAST_PIECES, _MOST_PIECES, _PIECE, _BOX_ROWS = 2, 2, 4, 16384, 16
_SLAB = _WIDTH * _BATCH * 4 + _WIDTH // 4 * 16  # bytes
_PATCH_ROWS, _PATCHES = 32, _CONSUMERS * 2 * 32 * _GROUP * 4  # of outputs on their way: batch rows, bytes
_STATIC_SHARED = 1024  # bytes that the kernels declare themselves, at most
_SHARED = 227 * 1024 - _STATIC_SHARED - 128  # a record is read 8 bytes beyond its end
_MOST_RECORD_BLOCKS = 132 * 8
_MOST_UNITS = 2**30 - 1  # of 16 bytes, that records take: kernels count halves of them as an int


@dataclass(frozen=True)
class Choice:
    """Among how many blocks W's groups of rows are shared out."""

    row_blocks: int


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    orders = (f"spmm_csr_tall_order<{index}>" for index in _INDICES.values())
    return (*orders, "spmm_csr_tall_records", "spmm_csr_tall")


def stage(groups: int, room: int) -> int:
    """Bytes of a slab and of a record of ``room`` bytes for each of a block's groups."""
    return _SLAB + -(-groups * room // 128) * 128


def pieces(groups: int, room: int) -> int:
    """How many pieces of x, as it lies, there is memory for."""
    return min(_MOST_PIECES, (_SHARED - _PATCHES - _STAGES * stage(groups, room)) // _PIECE)


def shared(groups: int, room: int) -> int:
    """Dynamic shared memory of a block, in bytes: pieces of x, outputs on their way, slabs."""
    return pieces(groups, room) * _PIECE + _PATCHES + _STAGES * stage(groups, room) + 128


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, nnz: int, room: int, processors: int) -> tuple[float, Choice | None]:
    """What takes the least time, as far as this model of an H200 knows, and its µs; None where nothing fits.

    A slab takes 6600 clocks to come and to be turned, and 9.6 an entry: together, where one of them is most of it, not
    much longer than that.
    """
    groups, slabs = -(-n // _GROUP), -(-k // _WIDTH)

    def us(row_blocks: int) -> float:
        rounds = -(-row_blocks * -(-m // _BATCH) // processors)
        return 6 + rounds * slabs * math.hypot(6600, 9.6 * nnz / row_blocks / slabs) / 1980  # clocks a µs

    fewest = -(-groups // _CONSUMERS)
    every = (i for i in range(fewest, groups + 1) if pieces(-(-groups // i), room) >= _LEAST_PIECES)
    best = min(every, key=us, default=None)
    return (math.inf, None) if best is None else (us(best), Choice(best))


def _units(nnz: int, shape) -> int:
    """The most that records take, in units of 16 bytes: two entries each, and a unit or two more a record."""
    groups, slabs = -(-shape[0] // _GROUP), -(-shape[1] // _WIDTH)
    return (nnz + 1) // 2 + groups * (2 * slabs + 1)


class Plan:
    """The order of W's entries, for one pattern: made once, used by every product. Values may change.

    ``room`` are the bytes of the largest record; ``repeats`` says whether a column does, in a row: then the plan is no
    use. To know both it waits for the GPU.
    """

    def __init__(self, cols, row_offsets, shape):
        (n, k), device = shape, cols.device
        self.groups, self.slabs = -(-n // _GROUP), -(-k // _WIDTH)
        self.units = _units(cols.numel(), shape)
        self.sources = torch.empty((self.units, 4), dtype=torch.int32, device=device)
        self.segments = torch.empty((self.groups, self.slabs, 2), dtype=torch.int32, device=device)
        found = torch.zeros(2, dtype=torch.int32, device=device)
        arrays = (cols, row_offsets, self.sources, self.segments, found)
        arguments = (*(a.data_ptr() for a in arrays), n, k, self.slabs)
        instance = f"spmm_csr_tall_order<{_INDICES[cols.dtype]}>"
        launch(device, SOURCE, instance, "PPPPPqqi", arguments, grid=self.groups, block=_ORDER_BLOCK)
        most, repeats = found.tolist()
        self.room, self.repeats = 16 * most, bool(repeats)


def plan(cols, row_offsets, shape, even: bool) -> Plan | None:
    """A plan where it is of use: for few rows of W, none of them far longer than the rest (``even``)."""
    if not (even and shape[0] <= MOST_ROWS and shape[0] % 4 == 0) or _units(cols.numel(), shape) > _MOST_UNITS:
        return None
    found = Plan(cols, row_offsets, shape)
    return None if found.repeats else found


def takes(x) -> bool:
    """Whether the copy engine takes x (M, K) as it lies: in rows that start on 16 bytes."""
    return x.stride(1) == 1 and x.stride(0) >= x.shape[1] and not (x.stride(0) % 4 or x.data_ptr() % 16)


def run(choice: Choice, x, values, bias, y, relu: bool, plan: Plan) -> None:
    """The product by one choice, into a row-major y; of an x that `takes` and an N that is a multiple of 4."""
    (m, k), n, device, groups = x.shape, y.shape[1], x.device, -(-plan.groups // choice.row_blocks)
    records = torch.empty((plan.units, 4), dtype=torch.int32, device=device)
    arrays = (plan.segments, plan.sources, values, records)
    count = plan.groups * plan.slabs
    blocks = min(-(-count // (_ORDER_BLOCK // 32)), _MOST_RECORD_BLOCKS)
    arguments = (*(a.data_ptr() for a in arrays), count)
    launch(device, SOURCE, "spmm_csr_tall_records", "PPPPi", arguments, grid=blocks, block=_ORDER_BLOCK)
    items = choice.row_blocks * -(-m // _BATCH)
    _, processors = multiprocessors(device.index)
    kernel = prepare(
        device.index,
        SOURCE,
        "spmm_csr_tall",
        "128s128sPPPiiiiiiii",
        min(items, processors),
        32 * _WARPS,
        shared(groups, plan.room),
    )
    with following():
        kernel(
            (
                tensor_map(x.data_ptr(), x.dtype, m, k, x.stride(0), (_BOX_ROWS, _WIDTH), True, 0),
                tensor_map(y.data_ptr(), y.dtype, m, n, n, (_PATCH_ROWS, _GROUP), True, 0),
                0 if bias is None else bias.data_ptr(),
                plan.segments.data_ptr(),
                records.data_ptr(),
                n,
                k,
                relu,
                choice.row_blocks,
                items,
                pieces(groups, plan.room),
                stage(groups, plan.room),
                plan.room,
            )
        )
