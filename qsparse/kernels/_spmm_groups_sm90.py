"""The host side of ``spmm_csr_groups_sm90.cu``: the product in float32 on Hopper, for batches of more than a few rows.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._load import launch, prepare

SOURCE = "spmm_csr_groups_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_GROUP, _BATCH, _CONSUMERS, _PRODUCERS, _MOST_STAGES = 12, 256, 12, 4, 8
_PLAN_BLOCK, _ORDER_BLOCK, _TURN_BLOCK, _TURN = 1024, 256, 256, 64
_LONGEST_PART = 512  # a row of up to so many entries, or four times the mean, stays in one piece
_STATIC_SHARED = 7168  # bytes that the kernels declare themselves, at most
_SHARED = 227 * 1024 - _STATIC_SHARED
_SPLITS = {1: 132, 2: 132, 4: 120, 8: 120}  # blocks of a cluster, and how many blocks run at once in such clusters

# What the kernels take by value: see the structs of the same names.
_LINES, _GROUPS, _OUTPUT = struct.Struct("@Pqqqq"), struct.Struct("@PPPPPPqqii"), struct.Struct("@PPPqqqi4x")


@dataclass(frozen=True)
class Tile:
    """Slabs of ``width`` columns, for blocks of 256 batch rows and up to 12 groups of rows of W."""

    width: int

    def stage(self, groups: int, room: int) -> int:
        """Bytes of a slab and of the ``room`` entries of each of the block's groups."""
        return self.width * _BATCH * 4 + -(-groups * room * 8 // 1024) * 1024

    def stages(self, groups: int, room: int) -> int:
        """How many slabs there is memory for."""
        return min(_MOST_STAGES, (_SHARED - 128) // self.stage(groups, room))

    def shared(self, groups: int, room: int) -> int:
        """Dynamic shared memory of a block, in bytes: the slabs, then the outputs."""
        slabs = self.stages(groups, room) * self.stage(groups, room) + 128
        return max(slabs, 4 * groups * _GROUP * (_BATCH + 1))


# The wider, the less often a warp goes through its rows: the last is the best. Of the first two slabs fit in any case,
# however many entries lie in them.
TILES = (Tile(48), Tile(64))


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    orders = (f"spmm_csr_group_order<{index}, {tile.width}>" for index in _INDICES.values() for tile in TILES)
    tiles = (f"spmm_csr_groups<{tile.width}>" for tile in TILES)
    return ("spmm_csr_group_parts", *orders, *tiles, "spmm_csr_group_turn", "spmm_csr_group_join")


@dataclass(frozen=True)
class Choice:
    """The groups of a block, the blocks that share out the slabs of the same outputs, and whether they turn x."""

    groups: int
    split: int
    turns: bool = False


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, nnz: int, tile: Tile, room: int, processors: int) -> tuple[float, Choice]:
    """What takes the least time, as far as this model of an H200 knows, and its µs.

    For an entry a warp reads itself and a line of x, about 9 clocks of the shared memory of all warps together, and no
    warp by itself does so in less than 76. Each slab keeps all of them a while more, longer where blocks turn it.
    """
    density = min(nnz / (n * k), 1.0)
    groups, slabs = -(-n // _GROUP), -(-k // tile.width)
    entries = density * _GROUP * tile.width

    def clocks(choice: Choice) -> float:
        slab = max(choice.groups * 9.3, 76) * entries
        slab = slab + 3400 if choice.turns else max(slab + 1300, 3500)
        blocks = -(-groups // choice.groups) * -(-m // _BATCH) * choice.split
        waves = -(-blocks // min(_SPLITS[choice.split], processors))
        ends = 11000 + 8000 * (choice.split > 1)
        return waves * (-(-slabs // choice.split) * slab + ends) + (0 if choice.turns else 6000 + m * k * 0.0044)

    every = (
        Choice(count, split, turns)
        for count in range(1, min(_CONSUMERS, groups) + 1)
        for split in _SPLITS
        for turns in (False, True)
        if split <= slabs and tile.stages(count, room) >= 2
    )
    best = min(every, key=clocks)
    return 4.4 + clocks(best) / 1980, best  # µs of a launch, clocks a µs


def longest_part(n: int, nnz: int) -> int:
    """Entries up to which a row of a plan stays in one piece; kernels take it as an int."""
    return min(max(_LONGEST_PART, 4 * -(-nnz // max(n, 1))), 2**31 - 1)


class Plan:
    """The order of W's entries, for one pattern: made once, used by every product. Values may change.

    ``virtual`` counts the virtual rows, and ``room`` the entries of the fullest slab of a group; or they bound them,
    where nobody looked (``look``: waits for the GPU).
    """

    def __init__(self, cols, row_offsets, shape, look: bool = True):
        (n, self.k), device, nnz = shape, cols.device, cols.numel()
        self.cols = cols
        self.limit = longest_part(n, nnz)
        self.virtual = n + nnz // self.limit
        self.parts = torch.empty((self.virtual, 5), dtype=torch.int32, device=device)
        self.first = torch.empty(n + 1, dtype=torch.int32, device=device)
        self.sources = torch.empty((nnz, 2), dtype=torch.int32, device=device)
        parts = (row_offsets.data_ptr(), self.parts.data_ptr(), self.first.data_ptr(), n, self.limit)
        launch(device, SOURCE, "spmm_csr_group_parts", "PPPqi", parts, grid=1, block=_PLAN_BLOCK)
        most = self.order(TILES[-1 if look else 0])
        if look:
            self.virtual = int(self.first[n])
            self.room = max(2, -(-int(most) // 2) * 2)
            if self.tile.stages(_CONSUMERS, self.room) < 2:
                self.order(TILES[0])
        self.splits = self.virtual > n

    def order(self, tile: Tile) -> torch.Tensor:
        """Put the entries in the order of a tile's slabs; returns how many the fullest has, and leaves room for any."""
        self.tile, self.slabs, self.room = tile, -(-self.k // tile.width), _GROUP * tile.width
        groups, device = -(-self.virtual // _GROUP), self.cols.device
        self.segments = torch.empty((groups, self.slabs, 4), dtype=torch.int32, device=device)
        most = torch.zeros(1, dtype=torch.int32, device=device)
        arrays = (self.cols, self.first, self.parts, self.sources, self.segments, most)
        arguments = (*(a.data_ptr() for a in arrays), self.first.numel() - 1, self.k, self.slabs)
        instance = f"spmm_csr_group_order<{_INDICES[self.cols.dtype]}, {tile.width}>"
        launch(device, SOURCE, instance, "PPPPPPqqi", arguments, grid=groups, block=_ORDER_BLOCK)
        return most


def expected(m: int, n: int, k: int, nnz: int, plan: Plan | None, processors: int) -> tuple[float, Choice]:
    """`choose` for a plan; without one, its µs are counted too."""
    if plan:
        return choose(m, n, k, nnz, plan.tile, plan.room, processors)
    us, choice = choose(m, n, k, nnz, TILES[0], _GROUP * TILES[0].width, processors)
    return us + 13 + 3e-5 * nnz, choice


def run(choice: Choice, x, values, bias, y, relu: bool, plan: Plan) -> None:
    """The product by one choice; a block turns x only where that is contiguous along k."""
    (m, k), n, tile = x.shape, y.shape[1], plan.tile
    if choice.turns and x.stride(1) == 1 and x.stride(0) > 1:
        steps = x.stride()
    else:
        x, stride = turned(x)
        steps = 1, stride
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
        f"spmm_csr_groups<{tile.width}>",
        f"{_LINES.size}s{_GROUPS.size}s{_OUTPUT.size}siiiii",
        row_blocks * -(-m // _BATCH) * choice.split,
        32 * (_CONSUMERS + _PRODUCERS),
        tile.shared(choice.groups, plan.room),
        cluster=choice.split,
    )
    kernel(
        (
            _LINES.pack(x.data_ptr(), *steps, m, k),
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
