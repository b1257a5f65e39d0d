"""The host side of ``spmm_csr_sm80.cu`` and ``spmm_csr_small_sm80.cu``: plans, tiles, launches; and who takes what.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import math
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels import (
    _spmm_expand_sm90,
    _spmm_groups_sm90,
    _spmm_slab_sm90,
    _spmm_tall_sm90,
    _spmm_whole_sm90,
)
from qsparse.kernels._face import C_FLOATS, matrix, rows
from qsparse.kernels._load import launch, multiprocessors

TILES_SOURCE, SMALL_SOURCE = "spmm_csr_sm80.cu", "spmm_csr_small_sm80.cu"
INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
SMALL_M = 16  # up to here what takes time is reading W's entries
SMALL_N, SMALL_N_M = 16, 4096  # so few rows of W are too few for tiles, up to so many rows of x
_BATCHES = (1, 4, 8)  # rows of x that a block of the small kernel may hold
_CONSUMERS, _WARPS, _PLAN_BLOCK, _SEGMENTS_BLOCK, _SMALL_BLOCK = 12, 16, 1024, 256, 512
_STATIC_SHARED = 12288  # bytes that the kernels declare themselves, at most
_MOST_STAGES = 4
_MOST_SMALL_ROWS = 1024
_SLAB_PLAN_US = 26  # on an H200, where blocks that divide K need a plan that is not kept
_TURNED_A_US = 2e6  # bytes that a copy turns a µs there
DENSE, TALL = "dense", "tall"

# What the kernels take by value: see the structs of the same names.
MATRIX, WEIGHTS, _OUTPUT = struct.Struct("@Pqqqq?7x"), struct.Struct("@PPPPPqqqiii4x"), struct.Struct("@PPPqqqi4x")


@dataclass(frozen=True)
class Tile:
    """``v`` batch rows a lane, up to ``r`` rows of W a warp, slabs of ``width`` columns in a ring of ``stages``."""

    v: int
    r: int
    width: int
    stages: int

    @property
    def batch(self) -> int:
        """Batch rows of a block."""
        return 32 * self.v

    def shared(self, itemsize: int) -> int:
        """Dynamic shared memory of a block, in bytes."""
        return self.stages * self.width * self.batch * itemsize

    def most_rows(self, itemsize: int) -> int:
        """Rows of W of a block: as many as the consumers hold, and their outputs fit the slabs' memory."""
        return min(_CONSUMERS * self.r, self.shared(itemsize) // (4 * (self.batch + 1)))


def instances() -> dict[str, tuple[str, ...]]:
    """All kernels of both sources, by source."""
    pairs = [(value, index) for value in C_FLOATS.values() for index in INDICES.values()]
    tiles = [f"spmm_csr_tiles<{value}, {index}, {v}, {r}>" for value, index in pairs for v, r in _SHAPES]
    plans = ["spmm_csr_parts", *(f"spmm_csr_segments<{index}>" for index in INDICES.values())]
    joins = [f"spmm_csr_join<{value}>" for value in C_FLOATS.values()]
    small = [f"spmm_csr_small<{value}, {index}, {batch}>" for value, index in pairs for batch in _BATCHES]
    return {TILES_SOURCE: (*plans, *joins, *tiles), SMALL_SOURCE: tuple(small)}


_SHAPES = ((2, 16), (4, 16), (8, 8))  # (v, r)


@functools.cache
def shared_budget(device: int) -> int:
    """Bytes of dynamic shared memory that a block may have."""
    return torch.cuda.get_device_properties(device).shared_memory_per_block_optin - _STATIC_SHARED


@functools.cache
def tiles(itemsize: int, budget: int) -> tuple[Tile, ...]:
    """The tiles that fit ``budget`` bytes of shared memory: slabs as wide as leave two stages."""
    found = []
    for v, r in _SHAPES:
        for width in (128, 64):
            stages = min(_MOST_STAGES, budget // (width * 32 * v * itemsize))
            if stages >= 2:
                found.append(Tile(v, r, width, stages))
                break
    return tuple(found)


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, nnz: int, itemsize: int, budget: int, processors: int) -> tuple[Tile, int]:
    """The tile and the rows of W a block that take the fewest clocks, as far as this model knows.

    A block reads a line of x an entry (128 bytes a clock) and the entry itself, about 1.3 clocks, unless issuing the
    multiply-adds takes longer; and it writes each line once, after reading it from the L2 cache.
    """
    best = (math.inf, None, 0)
    density = nnz / (n * k)
    for tile in tiles(itemsize, budget):
        line = tile.batch * itemsize / 128
        issued = (13 + tile.v * (1 if itemsize == 4 else 2.5)) / 4
        entry = max(line + 1.3, issued)
        across = -(-m // tile.batch)
        fewest = -(-n // tile.most_rows(itemsize))
        for blocks in range(fewest, fewest + 4 * processors):
            rows = -(-n // blocks)
            waves = -(-across * -(-n // rows) // processors)
            clocks = waves * (rows * density * k * entry + 2 * line * k + 3000)
            if clocks < best[0]:
                best = (clocks, tile, rows)
    return best[1:]


class Plan:
    """Which entries of each row lie in which slab, for one pattern of W: made once, used by every product.

    Values may change; the pattern may not. ``splits`` says whether a row is in parts (None: nobody looked).
    """

    groups: object = None  # what the kernels of _spmm_groups_sm90 keep of the same pattern
    tall: object = None  # and those of _spmm_tall_sm90, where it is sparse
    few: object = None  # and that of _spmm_few_sm80, once it was wanted: see `kept` there

    def __init__(self, cols, row_offsets, shape, widths=None, look: bool = True):
        n, self.k = shape
        self._given = cols, row_offsets
        cols, row_offsets = rows(cols), rows(row_offsets)
        self.n, self.nnz, self.cols, self.row_offsets = n, cols.numel(), cols, row_offsets
        self.limit = _spmm_groups_sm90.longest_part(n, self.nnz)
        self.most_parts = n + self.nnz // self.limit
        self.first = torch.empty(n + 1, dtype=torch.int32, device=cols.device)
        self.parts = torch.empty((self.most_parts, 4), dtype=torch.int32, device=cols.device)
        arguments = (row_offsets.data_ptr(), self.parts.data_ptr(), self.first.data_ptr(), n, self.limit)
        launch(cols.device, TILES_SOURCE, "spmm_csr_parts", "PPPqi", arguments, grid=1, block=_PLAN_BLOCK)
        self.splits = None
        if self.most_parts == n:
            self.splits = False
        elif look:
            self.splits = int(self.first[n]) != n
        self._segments = {width: self._find(width) for width in widths or (64, 128)}

    def _find(self, width: int) -> torch.Tensor:
        slabs = -(-self.k // width)
        found = torch.empty((slabs, self.most_parts, 2), dtype=torch.int32, device=self.cols.device)
        arguments = (self.cols, self.row_offsets, self.first, self.parts, found)
        launch(
            self.cols.device,
            TILES_SOURCE,
            f"spmm_csr_segments<{INDICES[self.cols.dtype]}>",
            "PPPPPqiiq",
            (*(a.data_ptr() for a in arguments), self.n, slabs, width, self.most_parts),
            grid=-(-self.n // (_SEGMENTS_BLOCK // 32)),
            block=_SEGMENTS_BLOCK,
        )
        return found

    def segments(self, width: int) -> torch.Tensor:
        """(slabs, virtual rows, 2) int32: where a virtual row's entries in a slab begin and end."""
        return self._segments[width]

    def fits(self, cols, row_offsets, shape) -> bool:
        """Whether the plan was made for these very arrays."""
        pairs = zip(self._given, (cols, row_offsets), strict=True)
        same = all(
            a is b or (a.data_ptr() == b.data_ptr() and a.stride() == b.stride() and a.shape == b.shape)
            for a, b in pairs
        )
        return same and tuple(shape) == (self.n, self.k)


def spmm(x, values, cols, row_offsets, bias, n: int, relu: bool, columns: bool, plan: Plan | None, ieee: bool = True):
    """``act(x @ W.T + bias)``, row-major, or column-major with ``columns``; float32 by multiply-adds with ``ieee``."""
    (m, k), nnz = x.shape, values.numel()
    large = m > SMALL_M and (n > SMALL_N or m > SMALL_N_M) and n and nnz and k
    hopper = torch.cuda.get_device_capability(x.device) == (9, 0)
    choice = _hopper_choice(x, n, nnz, plan, columns, ieee) if hopper and large else None
    if choice == DENSE:
        y = _spmm_expand_sm90.spmm(x, values, cols, row_offsets, bias, n, relu, ieee)
        return rows(y.t()).t() if columns else y
    y = torch.empty((n, m) if columns else (m, n), dtype=x.dtype, device=x.device)
    y = y.t() if columns else y
    if not y.numel():
        return y
    if hopper and m <= SMALL_M and _spmm_whole_sm90.takes(x):
        _spmm_whole_sm90.run(x, values, cols, row_offsets, bias, y, relu)
    elif not large:
        _small(x, values, cols, row_offsets, bias, y, relu)
    elif isinstance(choice, _spmm_slab_sm90.Choice):
        run_slab(choice, x, values, cols, row_offsets, bias, y, relu, plan)
    elif choice == TALL:
        _spmm_tall_sm90.run(x, values, bias, y, relu, plan.tall)
    elif isinstance(choice, _spmm_groups_sm90.Choice):
        groups = plan.groups if plan else _spmm_groups_sm90.Plan(cols, row_offsets, (n, k), look=False)
        _spmm_groups_sm90.run(choice, x, values, bias, y, relu, groups)
    else:
        _tiles(x, values, cols, row_offsets, bias, y, relu, plan)
    return y


def _hopper_choice(x, n: int, nnz: int, plan: Plan | None, columns: bool, ieee: bool):
    """What takes the least time on an H200: how to go by slabs or groups, `TALL`, `DENSE`, or None for tiles.

    `DENSE` is W written out and multiplied by `gemm`: in float32 by multiply-adds with ``ieee``, and in halves
    row-major only, where the tensor cores take x.
    """
    (m, k), itemsize = x.shape, x.element_size()
    _, processors = multiprocessors(x.device.index)
    us, choice = _spmm_slab_sm90.choose(m, n, k, nnz, itemsize, processors)
    if x.dtype != torch.float32:
        if us < _spmm_expand_sm90.time(x.dtype, m, n, k, False, nnz):
            return choice
        dense = not columns and _in_vectors(x) and _spmm_expand_sm90.pays(x.dtype, m, n, k, nnz)
        return DENSE if dense else None
    if choice and choice.split > 1 and plan is None:
        us += _SLAB_PLAN_US
    groups_us, groups = _spmm_groups_sm90.expected(x, n, nnz, plan and plan.groups, processors)
    if groups_us < us:
        us, choice = groups_us, groups
    if plan and plan.tall and not columns and _spmm_groups_sm90.how_it_lies(x) == "rows":
        tall_us = _spmm_tall_sm90.time(m, plan.tall, processors)
        if tall_us < 0.97 * us:  # what the models do not know
            us, choice = tall_us, TALL
    dense_us = _spmm_expand_sm90.time(x.dtype, m, n, k, ieee or min(m, n) < 128)
    if columns:
        dense_us += m * n * 8 / _TURNED_A_US
    return DENSE if dense_us < us else choice


def _in_vectors(x) -> bool:
    """Whether x, as `matrix` gives it, starts on 16 bytes in each row (or column, if those are contiguous)."""
    m, k = x.shape
    if x.stride(1) == 1 and x.stride(0) >= k:
        start, stride = x.data_ptr(), x.stride(0)
    elif x.stride(0) == 1 and x.stride(1) >= m:
        start, stride = x.data_ptr(), x.stride(1)
    else:
        start, stride = 0, k  # of the copy that it makes
    return not (start % 16 or stride * x.element_size() % 16)


def wide(x, k_major: bool, stride: int) -> bool:
    """Whether the matrix consists of whole vectors of 16 bytes along its contiguous direction."""
    length = x.shape[1] if k_major else x.shape[0]
    return not (x.data_ptr() % 16 or stride * x.element_size() % 16 or length * x.element_size() % 16)


def _address(value) -> int:
    return 0 if value is None else value.data_ptr()


def _small(x, values, cols, row_offsets, bias, y, relu: bool) -> None:
    (m, k), n = x.shape, y.shape[1]
    batch = next((each for each in _BATCHES if each >= m), _BATCHES[-1])
    across = -(-m // batch)
    _, processors = multiprocessors(x.device.index)
    rows = min(-(-n // max(1, processors // across)), _MOST_SMALL_ROWS)
    line = batch * x.element_size()
    width = min(-(-max(k, 1) // 8) * 8, (shared_budget(x.device.index) - rows * batch * 4) // line // 8 * 8)
    arguments = (x.data_ptr(), *x.stride(), values.data_ptr(), cols.data_ptr(), row_offsets.data_ptr(), _address(bias))
    launch(
        x.device,
        SMALL_SOURCE,
        f"spmm_csr_small<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}, {batch}>",
        "PqqPPPPPqqqqqiii",
        (*arguments, y.data_ptr(), *y.stride(), m, n, k, rows, width, relu),
        grid=-(-n // rows) * across,
        block=_SMALL_BLOCK,
        shared=width * line + rows * batch * 4,
    )


def run_slab(choice, x, values, cols, row_offsets, bias, y, relu: bool, plan: Plan | None) -> None:
    """The product by slabs of x that a block keeps."""
    (m, k), n = x.shape, y.shape[1]
    width = _spmm_slab_sm90.PLAN_WIDTH
    if choice.split > 1 and plan is None:
        plan = Plan(cols, row_offsets, (n, k), (width,), look=False)
    partial = _partial(plan, m) if choice.split > 1 else None
    x, k_major, stride = matrix(x)
    steps = (stride, 1) if k_major else (1, stride)
    of_x = MATRIX.pack(x.data_ptr(), *steps, m, k, wide(x, k_major, stride))
    output = _OUTPUT.pack(y.data_ptr(), _address(bias), _address(partial), *y.stride(), m, relu)
    _spmm_slab_sm90.run(choice, x, values, cols, row_offsets, plan, y, of_x, output)
    if partial is not None:
        _join(plan, y, output)


def _tiles(x, values, cols, row_offsets, bias, y, relu: bool, plan: Plan | None) -> None:
    (m, k), n, nnz = x.shape, y.shape[1], values.numel()
    device, itemsize = x.device, x.element_size()
    _, processors = multiprocessors(device.index)
    tile, rows = choose(m, n, k, nnz, itemsize, shared_budget(device.index), processors)
    run_tile(tile, rows, x, values, cols, row_offsets, bias, y, relu, plan)


def run_tile(tile: Tile, rows: int, x, values, cols, row_offsets, bias, y, relu: bool, plan: Plan | None) -> None:
    """The product by one tile, ``rows`` rows of W a block."""
    (m, k), n = x.shape, y.shape[1]
    device, itemsize = x.device, x.element_size()
    plan = plan or Plan(cols, row_offsets, (n, k), (tile.width,), look=False)
    x, k_major, stride = matrix(x)
    partial = _partial(plan, m)
    arrays = (cols, row_offsets, plan.segments(tile.width), plan.parts, plan.first)
    slabs = -(-k // tile.width)
    weights = WEIGHTS.pack(*(a.data_ptr() for a in arrays), n, k, plan.most_parts, plan.nnz, slabs, tile.width)
    output = _OUTPUT.pack(y.data_ptr(), _address(bias), _address(partial), *y.stride(), m, relu)
    steps = (stride, 1) if k_major else (1, stride)
    blocks = -(-plan.most_parts // rows)
    launch(
        device,
        TILES_SOURCE,
        f"spmm_csr_tiles<{C_FLOATS[x.dtype]}, {INDICES[cols.dtype]}, {tile.v}, {tile.r}>",
        f"{MATRIX.size}sP{WEIGHTS.size}s{_OUTPUT.size}siii",
        (
            MATRIX.pack(x.data_ptr(), *steps, m, k, wide(x, k_major, stride)),
            values.data_ptr(),
            weights,
            output,
            blocks,
            rows,
            tile.stages,
        ),
        grid=blocks * -(-m // tile.batch),
        block=32 * _WARPS,
        shared=tile.shared(itemsize),
    )
    if partial is not None:
        _join(plan, y, output)


def _partial(plan: Plan, m: int) -> torch.Tensor | None:
    """Room for the sums of rows in parts, (slots, M); None where no row is."""
    slots = 0 if plan.splits is False else 2 * (plan.nnz // plan.limit)
    return torch.empty((slots, m), dtype=torch.float32, device=plan.cols.device) if slots else None


def _join(plan: Plan, y, output: bytes) -> None:
    """The outputs of rows in parts."""
    launch(
        y.device,
        TILES_SOURCE,
        f"spmm_csr_join<{C_FLOATS[y.dtype]}>",
        f"Pq{_OUTPUT.size}s",
        (plan.first.data_ptr(), plan.n, output),
        grid=min(plan.n, _PLAN_BLOCK),
        block=_PLAN_BLOCK,
    )
