"""The host side of ``spmm_csr_groups_sm90.cu``: the product in float32 on Hopper, for batches of more than a few rows.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._load import launch, multiprocessors, prepare

SOURCE = "spmm_csr_groups_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_GROUP, _WIDTH, _MOST_STAGES, _PRODUCERS = 12, 32, 8, 4
_PLAN_BLOCK, _ORDER_BLOCK, _TURN_BLOCK, _TURN = 1024, 256, 256, 64
_LONGEST_PART = 512  # a row of up to so many entries, or four times the mean, stays in one piece
_STATIC_SHARED = 7168  # bytes that the kernels declare themselves, at most
_SHARED = 227 * 1024 - _STATIC_SHARED
_SPLITS = {1: 132, 2: 132, 4: 128, 8: 120}  # blocks of a cluster, and how many blocks run at once in such clusters

# What the kernels take by value: see the structs of the same names.
_LINES, _GROUPS, _OUTPUT = struct.Struct("@Pqqq"), struct.Struct("@PPPPPPqqii"), struct.Struct("@PPPqqqi4x")


@dataclass(frozen=True)
class Tile:
    """``v`` batch rows a lane, ``consumers`` warps, each with ``g`` groups of rows of W."""

    v: int
    g: int
    consumers: int

    @property
    def batch(self) -> int:
        """Batch rows of a block."""
        return 32 * self.v

    def stage(self, groups: int, room: int) -> int:
        """Bytes of a slab and of the ``room`` entries of each of the block's groups."""
        return _WIDTH * self.batch * 4 + -(-groups * room * 8 // 128) * 128

    def stages(self, groups: int, room: int) -> int:
        """How many slabs there is memory for."""
        return min(_MOST_STAGES, (_SHARED - 128) // self.stage(groups, room))

    def shared(self, groups: int, room: int) -> int:
        """Dynamic shared memory of a block, in bytes: the slabs, then the outputs."""
        slabs = self.stages(groups, room) * self.stage(groups, room) + 128
        return max(slabs, 4 * groups * _GROUP * (self.batch + 1))


TILES = (Tile(8, 1, 12),)


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    orders = (f"spmm_csr_group_order<{index}>" for index in _INDICES.values())
    tiles = (f"spmm_csr_groups<{tile.v}, {tile.g}, {tile.consumers}>" for tile in TILES)
    return ("spmm_csr_group_parts", *orders, *tiles, "spmm_csr_group_turn", "spmm_csr_group_join")


@dataclass(frozen=True)
class Choice:
    """The tile, the groups of a block, and the blocks that share out the slabs of the same outputs."""

    tile: Tile
    groups: int
    split: int


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, nnz: int, processors: int) -> Choice:
    """What takes the fewest clocks, as far as this model knows.

    For an entry a warp reads itself and a line of x, at 128 bytes a clock for all warps together; x's lines are written
    at the same rate; and each slab keeps a warp about 1,300 clocks more.
    """
    density = min(nnz / (n * k), 1.0)
    groups, slabs = -(-n // _GROUP), -(-k // _WIDTH)
    entries = density * _GROUP * _WIDTH

    def clocks(choice: Choice) -> float:
        tile, count = choice.tile, choice.groups
        slab = count * entries * (tile.v + 1) + _WIDTH * tile.v + 1300 * tile.g
        blocks = -(-groups // count) * -(-m // tile.batch) * choice.split
        waves = -(-blocks // min(_SPLITS[choice.split], processors))
        ends = 4000 + 0.12 * count * _GROUP * tile.batch + 2000 * (choice.split > 1)
        return waves * (-(-slabs // choice.split) * slab + ends)

    every = (
        Choice(tile, count, split)
        for tile in TILES
        for count in range(1, min(tile.consumers * tile.g, groups) + 1)
        for split in _SPLITS
        if split <= slabs and tile.stages(count, _GROUP * _WIDTH) >= 2
    )
    return min(every, key=clocks)


class Plan:
    """The order of W's entries, for one pattern: made once, used by every product. Values may change.

    ``virtual`` counts the virtual rows, or bounds them where nobody looked (``look``: waits for the GPU).
    """

    def __init__(self, cols, row_offsets, shape, look: bool = True):
        n, k = shape
        device, nnz = cols.device, cols.numel()
        self.cols, self.slabs = cols, -(-k // _WIDTH)
        self.limit = max(_LONGEST_PART, 4 * -(-nnz // max(n, 1)))
        self.virtual = n + nnz // self.limit
        groups = -(-self.virtual // _GROUP)

        def empty(*size: int) -> torch.Tensor:
            return torch.empty(size, dtype=torch.int32, device=device)

        self.parts, self.first, self.sources = empty(self.virtual, 5), empty(n + 1), empty(nnz, 2)
        self.segments, most = empty(groups, self.slabs, 4), torch.zeros(1, dtype=torch.int32, device=device)
        parts = (row_offsets.data_ptr(), self.parts.data_ptr(), self.first.data_ptr(), n, self.limit)
        launch(device, SOURCE, "spmm_csr_group_parts", "PPPqi", parts, grid=1, block=_PLAN_BLOCK)
        arrays = (cols, self.first, self.parts, self.sources, self.segments, most)
        arguments = (*(a.data_ptr() for a in arrays), n, k, self.slabs)
        instance = f"spmm_csr_group_order<{_INDICES[cols.dtype]}>"
        launch(device, SOURCE, instance, "PPPPPPqqi", arguments, grid=groups, block=_ORDER_BLOCK)
        self.room = _GROUP * _WIDTH
        if look:
            self.virtual = int(self.first[n])
            self.room = max(2, -(-int(most) // 2) * 2)
        self.splits = self.virtual > n


def pays(m: int, n: int) -> bool:
    """Whether these kernels take less time than those of ``spmm_csr_sm80.cu``, on an H200."""
    return min(m, n) >= 512 and m * n >= 2**21


def spmm(x, values, cols, row_offsets, bias, y, relu: bool, plan: Plan | None) -> None:
    """``y = act(x @ W.T + bias)``, y in any strides."""
    (m, k), n, nnz = x.shape, y.shape[1], values.numel()
    choice = choose(m, n, k, nnz, multiprocessors(x.device.index)[1])
    run(choice, x, values, bias, y, relu, plan or Plan(cols, row_offsets, (n, k), look=False))


def run(choice: Choice, x, values, bias, y, relu: bool, plan: Plan) -> None:
    """The product by one choice."""
    (m, k), n, tile = x.shape, y.shape[1], choice.tile
    xt, stride = turned(x)
    partial = torch.empty((2 * (plan.virtual - n), m) if plan.splits else 0, dtype=torch.float32, device=x.device)
    arrays = (plan.cols, plan.parts, plan.first, plan.segments, values, plan.sources)
    narrow = plan.cols.dtype == torch.uint16
    output = _OUTPUT.pack(
        y.data_ptr(), 0 if bias is None else bias.data_ptr(), partial.data_ptr(), *y.stride(), m, relu
    )
    row_blocks = -(-plan.virtual // (choice.groups * _GROUP))
    kernel = prepare(
        x.device.index,
        SOURCE,
        f"spmm_csr_groups<{tile.v}, {tile.g}, {tile.consumers}>",
        f"{_LINES.size}s{_GROUPS.size}s{_OUTPUT.size}siiiii",
        row_blocks * -(-m // tile.batch) * choice.split,
        32 * (tile.consumers + _PRODUCERS),
        tile.shared(choice.groups, plan.room),
        cluster=choice.split,
    )
    kernel(
        (
            _LINES.pack(xt.data_ptr(), stride, m, k),
            _GROUPS.pack(*(a.data_ptr() for a in arrays), n, k, plan.slabs, narrow),
            output,
            row_blocks,
            choice.groups,
            choice.split,
            tile.stages(choice.groups, plan.room),
            plan.room,
        )
    )
    if plan.splits:
        arguments = (plan.first.data_ptr(), n, output)
        instance, grid = "spmm_csr_group_join", min(n, _PLAN_BLOCK)
        launch(x.device, SOURCE, instance, f"Pq{_OUTPUT.size}s", arguments, grid=grid, block=_PLAN_BLOCK)


def turned(x) -> tuple[torch.Tensor, int]:
    """What holds x (M, K) turned, rows of whole 16 bytes, and how far apart they are: x itself if it lies that way."""
    m, k = x.shape
    stride = x.stride(1)
    if x.stride(0) == 1 and stride >= m and not (x.data_ptr() % 16 or stride % 4 or m % 4):
        return x, stride
    stride = -(-m // 4) * 4
    xt = torch.empty((k, stride), dtype=x.dtype, device=x.device)
    arguments = (x.data_ptr(), *x.stride(), xt.data_ptr(), stride, m, k)
    grid = -(-m // _TURN) * -(-k // _TURN)
    launch(x.device, SOURCE, "spmm_csr_group_turn", "PqqPqqq", arguments, grid=grid, block=_TURN_BLOCK)
    return xt, stride
