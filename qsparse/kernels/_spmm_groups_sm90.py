"""The host side of ``spmm_csr_groups_sm90.cu``: the product in float32 on Hopper, for batches of more than a few rows.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`; it hands over arrays that are checked and contiguous.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._load import following, launch, prepare, tensor_map

SOURCE = "spmm_csr_groups_sm90.cu"
_INDICES = {torch.int32: "int", torch.uint16: "unsigned short"}
_GROUP, _BATCH, _CONSUMERS, _TURNERS, _MOST_STAGES = 8, 256, 16, 3, 8
_PLAN_BLOCK, _ORDER_BLOCK, _PREPARE_BLOCK, _TURN = 1024, 256, 256, 64
_INT32 = 2**31 - 1
_LONGEST_PART = 512  # a row of up to so many entries, or four times the mean, stays in one piece
_STATIC_SHARED = 2048  # bytes that the kernels declare themselves, at most
_SHARED = 227 * 1024 - _STATIC_SHARED - 128  # a record is read 16 bytes beyond its end
_STAGING = 2 * 32 * _BATCH * 4  # where x lies that a block turns
_SPLITS = {1: 132, 2: 132, 4: 120, 8: 120}  # blocks of a cluster, and how many blocks run at once in such clusters
_MOST_RECORD_BLOCKS = 132 * 8
_SPARE = 1 + _GROUP // 2  # units of a record beyond those of its entries, at most

# What the kernels take by value: see the structs of the same names.
_LINES, _GROUPS, _OUTPUT = struct.Struct("@Pqqqq"), struct.Struct("@PPPPPPPqqii"), struct.Struct("@PPPqqqii")


@dataclass(frozen=True)
class Tile:
    """Slabs of ``width`` columns, for blocks of 256 batch rows and some groups of rows of W."""

    width: int

    def stage(self, groups: int, room: int) -> int:
        """Bytes of a slab and of a record of ``room`` bytes for each of the block's groups."""
        return self.width * _BATCH * 4 + -(-groups * room // 128) * 128

    def stages(self, groups: int, room: int, turned: bool) -> int:
        """How many slabs there is memory for."""
        return min(_MOST_STAGES, (_SHARED - (0 if turned else _STAGING)) // self.stage(groups, room))

    def shared(self, groups: int, room: int, turned: bool) -> int:
        """Dynamic shared memory of a block, in bytes: the slabs, then the outputs."""
        slabs = self.stages(groups, room, turned) * self.stage(groups, room) + 128
        return max(slabs + (0 if turned else _STAGING), 4 * groups * _GROUP * (_BATCH + 4))


# The wider, the less often a warp goes through its rows: the last is the best. Of the first two slabs fit in any case,
# however many entries lie in them. Blocks turn slabs of the last alone.
TILES = (Tile(48), Tile(64))


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    orders = (f"spmm_csr_group_order<{index}, {tile.width}>" for index in _INDICES.values() for tile in TILES)
    tiles = (f"spmm_csr_groups<{tile.width}, true>" for tile in TILES)
    turning = f"spmm_csr_groups<{TILES[-1].width}, false>"
    return ("spmm_csr_group_parts", *orders, *tiles, turning, "spmm_csr_group_prepare", "spmm_csr_group_join")


@dataclass(frozen=True)
class Choice:
    """The most groups of a block, the blocks that share out the slabs of the same outputs, and who turns x.

    ``turned``: it lies turned, or is turned beforehand; else blocks turn it.
    """

    groups: int
    split: int
    turned: bool = True


@functools.lru_cache(maxsize=4096)
def choose(
    m: int, n: int, k: int, nnz: int, tile: Tile, room: int, processors: int, lies: str = "rows"
) -> tuple[float, Choice]:
    """What takes the least time, as far as this model of an H200 knows, and its µs.

    ``lies`` is what `how_it_lies` says of x. An entry costs a warp 8.5 clocks of the shared memory of all warps
    together, and a column's batch rows 8 to write there; no warp by itself is faster than 75 clocks an entry and 92 a
    row in a slab.
    """
    density = min(nnz / (n * k), 1.0)
    groups, slabs, batches = -(-n // _GROUP), -(-k // tile.width), -(-m // _BATCH)
    entries = density * _GROUP * tile.width

    def clocks(choice: Choice) -> float:
        row_blocks = -(-groups // choice.groups)
        per_block = groups / row_blocks
        fill = tile.width * (8.75 if choice.turned else 26)
        slab = 200 + 1.04 * max(per_block * entries * 8.7 + fill, 92 * _GROUP + 75 * entries)
        slab = max(slab, 0 if choice.turned else 2600)
        blocks = row_blocks * batches * choice.split
        waves = -(-blocks // min(_SPLITS[choice.split], processors))
        ends = 16000 + 9000 * (choice.split > 1)
        turn = 0 if lies == "turned" or not choice.turned else 4000 + m * k * 0.0055
        return waves * (-(-slabs // choice.split) * slab + ends) + turn + 3000

    every = (
        Choice(count, split, turned)
        for turned in ((True, False) if lies == "rows" and tile == TILES[-1] else (True,))
        for count in range(1, min(_CONSUMERS, groups) + 1)
        for split in _SPLITS
        if split <= slabs and tile.stages(count, room, turned) >= 2
    )
    best = min(every, key=clocks)
    return 4.4 + clocks(best) / 1980, best  # µs of a launch, clocks a µs


def longest_part(n: int, nnz: int) -> int:
    """Entries up to which a row of a plan stays in one piece; kernels take it as an int."""
    return min(max(_LONGEST_PART, 4 * -(-nnz // max(n, 1))), _INT32)


class Plan:
    """The order of W's entries, for one pattern: made once, used by every product. Values may change.

    ``virtual`` counts the virtual rows, ``room`` the bytes of the largest record, and ``joins`` says whether something
    is left to the kernel that joins; or they bound them, where nobody looked (``look``: waits for the GPU).
    """

    def __init__(self, cols, row_offsets, shape, look: bool = True):
        (self.n, self.k), device, nnz = shape, cols.device, cols.numel()
        n = self.n
        self.cols, self.look = cols, look
        self.limit = longest_part(n, nnz)
        self.virtual = n + nnz // self.limit
        self.parts = torch.empty((self.virtual, 5), dtype=torch.int32, device=device)
        self.first = torch.empty(n + 1, dtype=torch.int32, device=device)
        parts = (row_offsets.data_ptr(), self.parts.data_ptr(), self.first.data_ptr(), n, self.limit)
        launch(device, SOURCE, "spmm_csr_group_parts", "PPPqi", parts, grid=1, block=_PLAN_BLOCK)
        found = self.order(TILES[-1 if look else 0])
        self.joins = True
        if look:
            most, repeats = found.tolist()
            self.room = 16 * most
            if self.tile.stages(_CONSUMERS, self.room, True) < 2:
                self.order(TILES[0])
            self.virtual = int(self.first[n])
            self.joins = bool(repeats) or self.virtual > n

    def order(self, tile: Tile) -> torch.Tensor:
        """Put the entries in the order of a tile's slabs, and leave room for any; returns what the kernel found."""
        groups, device = -(-self.virtual // _GROUP), self.cols.device
        self.tile, self.slabs, self.room = tile, -(-self.k // tile.width), 16 * (1 + _GROUP * tile.width // 2)
        nnz = self.cols.numel()
        in_twos, one_by_one = (nnz + 1) // 2 + groups * (_SPARE * self.slabs + 1), nnz + groups * self.slabs
        self.units = min(in_twos, one_by_one)  # of 16 bytes, that records take at most
        if self.units > _INT32:
            raise ValueError(f"a pattern of {nnz} entries and {groups * self.slabs} records is too large")
        self.sources = torch.empty((self.units, 4), dtype=torch.int32, device=device)
        self.segments = torch.empty((groups, self.slabs, 4), dtype=torch.int32, device=device)
        self.found = torch.zeros(2, dtype=torch.int32, device=device)
        arrays = (self.cols, self.first, self.parts, self.sources, self.segments, self.found)
        arguments = (*(a.data_ptr() for a in arrays), self.n, self.k, self.slabs, in_twos < one_by_one)
        instance = f"spmm_csr_group_order<{_INDICES[self.cols.dtype]}, {tile.width}>"
        launch(device, SOURCE, instance, "PPPPPPqqii", arguments, grid=groups, block=_ORDER_BLOCK)
        return self.found


def expected(x, n: int, nnz: int, plan: Plan | None, processors: int) -> tuple[float, Choice]:
    """`choose` for x and a plan; without one, its µs are counted too."""
    (m, k), lies = x.shape, how_it_lies(x)
    if plan:
        return choose(m, n, k, nnz, plan.tile, plan.room, processors, lies)
    us, choice = choose(m, n, k, nnz, TILES[0], 16 * (1 + _GROUP * TILES[0].width // 2), processors, lies)
    return us + 15 + 3e-5 * nnz, choice


def how_it_lies(x) -> str:
    """Where the copy engine takes x (M, K) as it is: "turned", contiguous along the batch, or in "rows"; or "else"."""
    (m, k), (m_step, k_step) = x.shape, x.stride()
    if x.data_ptr() % 16 == 0:
        if m_step == 1 and k_step >= m and k_step % 4 == 0:
            return "turned"
        if k_step == 1 and m_step >= k and m_step % 4 == 0:
            return "rows"
    return "else"


def run(choice: Choice, x, values, bias, y, relu: bool, plan: Plan) -> None:
    """The product by one choice; blocks turn x only where it lies in rows."""
    (m, k), n, tile, device, lies = x.shape, y.shape[1], plan.tile, x.device, how_it_lies(x)
    turned_before = choice.turned or lies != "rows" or tile != TILES[-1]
    groups = -(-plan.virtual // _GROUP)
    row_blocks = -(-groups // choice.groups)
    partial = torch.empty((2 * (plan.virtual - n), m), dtype=torch.float32, device=device)
    arrays = (plan.cols, plan.parts, plan.first, plan.segments, values, plan.sources, plan.found)
    w = _GROUPS.pack(*(a.data_ptr() for a in arrays), n, k, plan.slabs, plan.cols.dtype == torch.uint16)
    output = _output(y, bias, partial, relu)
    records = torch.empty((plan.units, 4), dtype=torch.int32, device=device)
    lines, stride = _prepare(x, turned_before and lies != "turned", w, records, -(-groups * plan.slabs // 8))
    if turned_before:
        box = tensor_map(lines.data_ptr(), x.dtype, k, m, stride, (tile.width, _BATCH), True, 0)
    else:
        box = tensor_map(x.data_ptr(), x.dtype, m, k, x.stride(0), (_BATCH, 32), True)
    kernel = prepare(
        device.index,
        SOURCE,
        f"spmm_csr_groups<{tile.width}, {'true' if turned_before else 'false'}>",
        f"128s{_GROUPS.size}s{_OUTPUT.size}sPiiiiii",
        row_blocks * -(-m // _BATCH) * choice.split,
        32 * (_CONSUMERS + 1 + (0 if turned_before else _TURNERS)),
        tile.shared(choice.groups, plan.room, turned_before),
        cluster=choice.split,
    )
    sizes = (
        plan.virtual if plan.look else -1,
        row_blocks,
        choice.split,
        tile.stages(choice.groups, plan.room, turned_before),
        tile.stage(choice.groups, plan.room),
        plan.room,
    )
    with following():
        kernel((box, w, output, records.data_ptr(), *sizes))
    if plan.joins:
        x_lines = _LINES.pack(x.data_ptr(), *x.stride(), m, k)
        arguments, formats = (x_lines, w, output), f"{_LINES.size}s{_GROUPS.size}s{_OUTPUT.size}s"
        launch(device, SOURCE, "spmm_csr_group_join", formats, arguments, grid=min(n, 1024), block=_PLAN_BLOCK)


def _output(y, bias, partial, relu: bool) -> bytes:
    """The kernels' ``Output``; whether columns of y can be stored in vectors of 16 bytes is found out here."""
    m_step, n_step = y.stride()
    vectors = y.data_ptr() % 16 == 0 and m_step == 1 and n_step % 4 == 0 and y.shape[0] % 4 == 0
    arguments = (y.data_ptr(), 0 if bias is None else bias.data_ptr(), partial.data_ptr(), *y.stride())
    return _OUTPUT.pack(*arguments, y.shape[0], relu, vectors)


def _prepare(x, turns: bool, w: bytes, records, blocks: int) -> tuple[torch.Tensor, int]:
    """Write W's records by some blocks, and x turned by others if ``turns``; what holds it, and its rows' distance."""
    (m, k), lines, stride, squares = x.shape, x, x.stride(1), 0
    if turns:
        stride = -(-m // 4) * 4
        lines = torch.empty((k, stride), dtype=x.dtype, device=x.device)
        squares = -(-m // _TURN) * -(-k // _TURN)
    blocks = min(blocks, _MOST_RECORD_BLOCKS)
    arguments = (
        w,
        _LINES.pack(x.data_ptr(), *x.stride(), m, k),
        records.data_ptr() if blocks else 0,
        lines.data_ptr(),
        stride,
        blocks,
    )
    formats = f"{_GROUPS.size}s{_LINES.size}sPPqi"
    launch(x.device, SOURCE, "spmm_csr_group_prepare", formats, arguments, grid=blocks + squares, block=_PREPARE_BLOCK)
    return lines, stride


def turned(x) -> tuple[torch.Tensor, int]:
    """What holds x (M, K) turned, rows of whole 16 bytes with zeros beyond M, and how far apart they are.

    It is x itself if that lies so.
    """
    if how_it_lies(x) == "turned" and x.shape[0] % 4 == 0:
        return x, x.stride(1)
    return _prepare(x, True, bytes(_GROUPS.size), None, 0)
