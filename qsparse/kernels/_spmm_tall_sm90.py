"""The host side of ``spmm_csr_tall_sm90.cu``: products in float32 on Hopper of many batch rows with few entries.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import math
import struct

import torch

from qsparse.kernels._load import following, launch, multiprocessors, prepare, tensor_map

SOURCE = "spmm_csr_tall_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_GROUP, _BATCH, _WIDTH, _CONSUMERS, _WARPS, _MOST_STAGES = 16, 128, 128, 16, 20, 8
_ORDER_BLOCK, _STARTS_BLOCK, _RECORDS_BLOCK = 256, 1024, 256
_FIXED = 1 + _GROUP  # units of 16 bytes of every record
_PIECE = 32 * _BATCH * 4  # of x, as it lies
_PLACES = 3  # of such pieces
_OUTPUTS = _CONSUMERS * 16 * _GROUP * 4  # bytes by way of which warps write outputs out
_STATIC_SHARED = 2048  # bytes that the kernels declare themselves, at most
_RING = 227 * 1024 - _STATIC_SHARED - _PLACES * _PIECE - _OUTPUTS
_LEAST_DENSITY, _MOST_DENSITY = 0.004, 0.03  # where it was timed; with fewer entries a plan is mostly empty places
_MOST_UNITS = 2**30  # places of entries, two a unit, are counted in an int
_OUTPUT = struct.Struct("@PPqqiii4x")


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    plans = (f"spmm_csr_tall_{kernel}<{index}>" for kernel in ("count", "order") for index in _INDICES.values())
    return (*plans, "spmm_csr_tall_starts", "spmm_csr_tall_records", "spmm_csr_tall")


class Plan:
    """The order of W's entries, for one pattern without repeated columns in a row; `stages` slabs fit the memory.

    Waits for the GPU. With fewer than two stages it is of no use, and there is no order.
    """

    def __init__(self, cols, row_offsets, shape):
        (self.n, self.k), device, nnz = shape, cols.device, cols.numel()
        self.nnz, self.slabs, groups = nnz, -(-self.k // _WIDTH), -(-self.n // _GROUP)
        self.row_blocks = -(-groups // _CONSUMERS)
        kind = _INDICES[cols.dtype]
        self.segments = torch.zeros((self.row_blocks, self.slabs, _CONSUMERS, 2), dtype=torch.int32, device=device)
        most = torch.zeros(1, dtype=torch.int32, device=device)
        pattern, sizes = (cols.data_ptr(), row_offsets.data_ptr()), (self.n, self.k, self.slabs)
        arguments = (*pattern, self.segments.data_ptr(), most.data_ptr(), *sizes)
        instance = f"spmm_csr_tall_count<{kind}>"
        launch(device, SOURCE, instance, "PPPPiqi", arguments, grid=groups, block=_ORDER_BLOCK)
        arguments = (self.segments.data_ptr(), self.row_blocks * self.slabs)
        launch(device, SOURCE, "spmm_csr_tall_starts", "Pq", arguments, grid=1, block=_STARTS_BLOCK)
        self.units = int(self.segments[..., 1].sum())
        records = _CONSUMERS * 16 * int(most) + 128  # which are read 16 bytes beyond their end
        self.stage = _WIDTH * _BATCH * 4 + records
        self.stages = min(_MOST_STAGES, _RING // self.stage)
        if self.stages < 2:
            return
        self.sources = torch.empty((self.units, 4), dtype=torch.int32, device=device)
        arguments = (*pattern, self.sources.data_ptr(), self.segments.data_ptr(), *sizes)
        instance = f"spmm_csr_tall_order<{kind}>"
        launch(device, SOURCE, instance, "PPPPiqi", arguments, grid=groups, block=_ORDER_BLOCK)


def plan(cols, row_offsets, shape) -> Plan | None:
    """A plan where it may be of use: of a pattern of few entries, evenly spread; y has rows of whole 16 bytes."""
    (n, k), nnz = shape, cols.numel()
    units = -(-n // _GROUP) * -(-k // _WIDTH) * _FIXED + nnz  # at most
    if not _LEAST_DENSITY * n * k <= nnz <= _MOST_DENSITY * n * k or n % 4 or k < _WIDTH or units > _MOST_UNITS:
        return None
    found = Plan(cols, row_offsets, shape)
    return found if found.stages >= 2 else None


def time(m: int, plan: Plan, processors: int) -> float:
    """The product's µs, as far as this model of an H200 knows: of a launch, of each piece of y and of its slabs."""
    _, waves = pieces(m, plan.row_blocks, processors)
    slab = max(2.5, 1.84 + 50 * plan.nnz / (plan.n * plan.k))
    return 8 + waves * (2.9 + plan.slabs * slab)


@functools.lru_cache(maxsize=1024)
def pieces(m: int, row_blocks: int, processors: int) -> tuple[int, int]:
    """Batch rows of a piece of y, so that blocks have equally many of them, and how many."""
    waves = -(-(-(-m // _BATCH) * row_blocks) // processors)
    if waves == 1:
        return _BATCH, 1
    down = max(waves * processors // row_blocks, math.ceil(m / _BATCH))
    return min(_BATCH, -(-m // (4 * down)) * 4), waves


def run(x, values, bias, y, relu: bool, plan: Plan) -> None:
    """The product of an x in rows that start on 16 bytes; y is row-major."""
    (m, k), device = x.shape, x.device
    _, processors = multiprocessors(device.index)
    step, _ = pieces(m, plan.row_blocks, processors)
    items = plan.row_blocks * -(-m // step)
    records = torch.empty((plan.units, 4), dtype=torch.int32, device=device)
    count = plan.segments.numel() // 2
    arguments = (values.data_ptr(), plan.sources.data_ptr(), plan.segments.data_ptr(), records.data_ptr(), count)
    grid = min(-(-count // (_RECORDS_BLOCK // 32)), 8 * processors)
    launch(device, SOURCE, "spmm_csr_tall_records", "PPPPi", arguments, grid=grid, block=_RECORDS_BLOCK)
    box = tensor_map(x.data_ptr(), x.dtype, m, k, x.stride(0), (step, 32), True)
    bias_address = 0 if bias is None else bias.data_ptr()
    vectors = not (y.data_ptr() % 16 or y.stride(0) % 4 or plan.n % 4 or bias_address % 16)
    output = _OUTPUT.pack(y.data_ptr(), bias_address, y.stride(0), m, plan.n, relu, vectors)
    kernel = prepare(
        device.index,
        SOURCE,
        "spmm_csr_tall",
        f"128s{_OUTPUT.size}sPPiiiiii",
        min(items, processors),
        32 * _WARPS,
        _PLACES * _PIECE + plan.stages * plan.stage + _OUTPUTS,
    )
    sizes = plan.slabs, plan.row_blocks, plan.stages, plan.stage, items, step
    with following():
        kernel((box, output, plan.segments.data_ptr(), records.data_ptr(), *sizes))
