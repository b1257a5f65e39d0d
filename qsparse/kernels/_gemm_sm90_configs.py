"""The instances of ``gemm_sm90.cu``, and which one, or which of ``gemm_single_sm90.cu``, suits a shape.

A shape of the tuning table, ``gemm_sm90.json``, takes the configuration that was the fastest there; any other the one
that should be by the costs of each, ``gemm_sm90_costs.json`` (:mod:`qsparse.kernels._gemm_costs`). ``qsparse bench gemm
--tune`` writes both. On a card without measurements the H200's costs serve.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Iterable
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import Any

import torch

from qsparse.kernels import _gemm_single_sm90
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._gemm_costs import STEP, Costs
from qsparse.kernels._gemm_single_sm90 import Single

TABLE = Path(__file__).with_name("gemm_sm90.json")
COSTS = TABLE.with_name("gemm_sm90_costs.json")
SHARED_LIMIT = 227 * 1024
NO_MASK, WRITE_MASK, APPLY_MASK = 0, 1, 2  # enum Mask of the kernel
NO_MAP = bytes(128)  # in place of a tensor map that is not used
_BOOL = ("false", "true")


@dataclass(frozen=True)
class Config:
    """One instance of the kernel; the names are its template parameters, explained at the head of the file.

    ``bm x bn`` is a block's tile, ``cm x cn`` the blocks of a cluster that share loads, ``split`` those that divide K,
    ``panels`` the shared memory for results in units of 8 KB a consumer, and ``group`` the rows of cluster tiles that
    are walked together.
    """

    bm: int
    bn: int
    consumers: int
    stages: int
    cm: int = 1
    cn: int = 1
    split: int = 1
    panels: int = 2
    pingpong: bool = False
    group: int = 8

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions or a Hopper block would refuse."""
        rows_each = self.bm // (1 if self.pingpong else self.consumers)
        if rows_each % 64 or rows_each * self.bn > 64 * 256 or self.bn not in (64, 128, 256):
            raise ValueError(f"a consumer cannot hold its share of the tile: {self}")
        if self.bm // self.cn % 32 or self.bn // self.cm % 32:
            raise ValueError(f"the blocks of the cluster cannot divide the loads: {self}")
        if self.split > 1 and (self.cm * self.cn > 1 or self.pingpong):
            raise ValueError(f"a cluster either splits K or shares loads: {self}")
        if self.split > 1 and self.bm * self.bn * 4 > self.stages * self._stage:
            raise ValueError(f"the partial sums do not fit the stages' memory: {self}")
        if self.shared() > SHARED_LIMIT:
            raise ValueError(f"{self.shared()} bytes of shared memory, {SHARED_LIMIT} allowed: {self}")

    @property
    def _stage(self) -> int:
        return (self.bm + self.bn) * STEP

    @property
    def cluster(self) -> int:
        return self.cm * self.cn * self.split

    def shared(self, column_bytes: int = 2) -> int:
        """Dynamic shared memory a block, in bytes, where the epilogue keeps ``column_bytes`` for each column."""
        staged = self.consumers * self.panels * 8192 if self.split == 1 else 0
        return self.stages * self._stage + staged + self.consumers * self.bn * column_bytes + 2 * self.stages * 8 + 1024

    def reads(self, x_k: bool, w_k: bool) -> bool:
        """Whether the cluster can divide loads of operands that lie this way (64-wide boxes where not K-major)."""
        return (x_k or self.bm // self.cn % 64 == 0) and (w_k or self.bn // self.cm % 64 == 0)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of whole clusters."""
        return -(-m // (self.bm * self.cm)) * -(-n // (self.bn * self.cn))

    def suits(self, m: int, n: int, k: int) -> bool:
        """Any shape: where K is short, some blocks of a split add nothing."""
        return True

    def instance(self, dtype, out, x_k: bool = True, w_k: bool = True, mask: int = NO_MASK, parts: int = 1) -> str:
        """The C++ name of the kernel."""
        layout = f"{_BOOL[x_k]}, {_BOOL[w_k]}"
        return f"gemm_sm90<{C_FLOATS[dtype]}, {C_FLOATS[out]}, {layout}, {self.tile_arguments}, {mask}, {parts}>"

    @property
    def tile_arguments(self) -> str:
        """The template arguments that every product of the pipeline has."""
        sizes = (self.bm, self.bn, self.consumers, self.stages, self.cm, self.cn, self.split, self.panels)
        return f"{', '.join(map(str, sizes))}, {_BOOL[self.pingpong]}"


# Big tiles need the fewest bytes; small ones fill the chip when there is little to do.
CONFIGS = (
    Config(128, 256, 2, 4),
    Config(128, 256, 2, 4, cm=2),
    Config(256, 128, 2, 4),
    Config(128, 128, 2, 6, cm=2, panels=1, pingpong=True),
    Config(128, 128, 2, 6, cn=2, panels=1, pingpong=True),
    Config(64, 128, 1, 7),
    Config(128, 64, 2, 6, panels=1),
    Config(64, 64, 1, 8, panels=1),
    Config(64, 64, 1, 8, split=2, panels=1),
    Config(64, 64, 1, 4, split=4, panels=1),
    Config(64, 128, 1, 4, split=4),
)
# float32 operands: tf32 takes the first two of the big tiles; two sets of sums, for the split ones, need small tiles.
TF32 = (Config(128, 256, 2, 4, cm=2, panels=1), Config(128, 128, 2, 6), Config(64, 128, 1, 7))
SPLIT = (Config(128, 128, 2, 6, cm=2), Config(64, 64, 1, 8))  # the second where its tiles leave no second round
# Outputs in float32 and masks are compiled for fewer shapes; these serve all sizes well enough.
FEW = (CONFIGS[0], CONFIGS[5], CONFIGS[7])
_16_BIT = (torch.float16, torch.bfloat16)
_H200 = "NVIDIA H200"
_MEASURED = {1: "int8", 2: "float16", 4: "float32"}  # the dtype that stands for all of its size


def _instances() -> Iterable[str]:
    layouts = [(x_k, w_k) for x_k in (True, False) for w_k in (True, False)]
    for dtype in _16_BIT:
        for x_k, w_k in layouts:
            yield from (c.instance(dtype, dtype, x_k, w_k, NO_MASK) for c in CONFIGS if c.reads(x_k, w_k))
            yield from (c.instance(dtype, torch.float32, x_k, w_k, NO_MASK) for c in FEW)
        yield from (c.instance(dtype, dtype, True, True, WRITE_MASK) for c in FEW)
        yield from (c.instance(dtype, dtype, True, False, APPLY_MASK) for c in FEW)
    yield from (c.instance(torch.float32, torch.float32) for c in TF32)
    yield from (c.instance(torch.float16, torch.float32, parts=2) for c in SPLIT)


INSTANCES = tuple(_instances())


def candidates(m: int, n: int, k: int, dtype, layout: str, device=None) -> list[Config | Single]:
    """Every configuration worth timing at a shape; ``layout`` is nt, nn, tn or tt (x then w, t: transposed)."""
    if dtype == torch.float32:  # as tf32, in layout nt
        return walked(TF32, m)
    x_k, w_k = k_major(layout)
    single = [c for c in _gemm_single_sm90.CONFIGS if c.reads(x_k, w_k) and c.suits(m, n, k)]
    return walked((c for c in CONFIGS if c.reads(x_k, w_k)), m) + single


def k_major(layout: str) -> tuple[bool, bool]:
    """``nt`` is x · wᵀ with both K-major; ``nn`` takes w as (K, N); ``tn`` takes x as (K, M) and w as (K, N)."""
    return layout[0] == "n", layout[1] == "t"


def layout_of(x_k: bool, w_k: bool) -> str:
    return ("n" if x_k else "t") + ("t" if w_k else "n")


def label(config: Config | Single) -> str:
    """A configuration in short: its numbers, as ``labelled`` reads them."""
    return ",".join(str(int(value)) for value in asdict(config).values())


def labelled(text: str) -> Config | Single:
    """The configuration of a label, validated."""
    numbers = [int(part) for part in text.split(",")]
    if len(numbers) == len(fields(Single)):
        return Single(*numbers)
    *sizes, pingpong, group = numbers
    return Config(*sizes, pingpong=bool(pingpong), group=group)


def unwalked(config: Config | Single) -> Config | Single:
    """The configuration, however its tiles are walked: the instance of the kernel."""
    return replace(config, group=8) if isinstance(config, Config) else config


@functools.cache
def table() -> dict[tuple[str, str, str], dict[tuple[int, int, int], Config | Single]]:
    """The fastest configuration by (gpu, dtype, layout) and shape; every row is validated as it is read."""
    found: dict = {}
    for row in json.loads(TABLE.read_text()):
        kind = Config if "group" in row["config"] else Single
        shapes = found.setdefault((row["gpu"], row["dtype"], row["layout"]), {})
        shapes[tuple(row["shape"])] = kind(**row["config"])
    return found


@functools.cache
def all_costs() -> dict[tuple[str, str, str], dict[Config | Single, Costs]]:
    """What each configuration costs, by (gpu, dtype, layout)."""
    found: dict = {}
    for row in json.loads(COSTS.read_text()):
        costs = found.setdefault((row["gpu"], row["dtype"], row["layout"]), {})
        costs[labelled(row["config"])] = Costs(**row["costs"])
    return found


@functools.lru_cache(maxsize=65536)
def choose(m: int, n: int, k: int, dtype: torch.dtype, x_k: bool, w_k: bool, gpu: str, sms: int) -> Config | Single:
    """The configuration of a product whose output has the operands' dtype."""
    layout = layout_of(x_k, w_k)
    for name in (str(dtype).removeprefix("torch."), _MEASURED[dtype.itemsize]):
        if measured := table().get((gpu, name, layout), {}).get((m, n, k)):
            return measured
    return fastest(candidates(m, n, k, dtype, layout), m, n, k, dtype, dtype, gpu, sms, layout)


def fastest(configs: Iterable[Any], m: int, n: int, k: int, dtype, out, gpu: str, sms: int, layout: str = "nt") -> Any:
    """The configuration that should take the least time by what was measured on this GPU, or else on an H200."""
    name = _MEASURED[dtype.itemsize]
    keys = ((card, name, each) for card in (gpu, _H200) for each in (layout, "nt"))
    costs = next(found for key in keys if (found := all_costs().get(key)))
    known = [config for config in configs if unwalked(config) in costs]
    return min(known, key=lambda c: costs[unwalked(c)].us(c, m, n, k * dtype.itemsize, out.itemsize, sms))


def walked(configs: Iterable[Config], m: int) -> list[Config]:
    """The configurations with each worth-while way to walk the tiles, the better one, where there are many, first."""
    groups = (16, 8) if m > 8 * 128 else (8,)
    return [replace(config, group=group) for config in configs for group in groups]


def output_map(config: Config, out: torch.dtype, m: int, n: int, y_offset: int) -> tuple | None:
    """What ``tensor_map`` needs besides the address of y (M, N); None where the copy engine cannot store it."""
    if config.split > 1 or n * out.itemsize % 16 or y_offset:
        return None
    return out, m, n, n, (16, 128 // out.itemsize), True


def grid(config: Config, m: int, n: int, sms: int) -> tuple[int, int]:
    """Blocks and threads a block: all tiles at once where K is split, else as many clusters as the chip holds."""
    tiles = config.tiles(m, n)
    clusters = tiles if config.split > 1 else min(tiles, sms // config.cluster)
    return clusters * config.cluster, 128 * (config.consumers + 1)
