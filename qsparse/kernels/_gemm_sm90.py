"""The host side of ``gemm_sm90.cu``: which operands it takes, which configuration suits a shape, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm`; it hands over what :func:`supports` accepts. The
configuration comes from the tuning table, ``gemm_sm90.json``, which ``qsparse bench gemm --tune`` writes: that of the
nearest measured shape of the same GPU, dtype and layout; on a card without measurements the H200's serve.
"""

from __future__ import annotations

import functools
import json
import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass
from pathlib import Path

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch, multiprocessors, tensor_map

SOURCE, SPLIT_SOURCE = "gemm_sm90.cu", "gemm_split.cu"
SPLIT_INSTANCES = ("gemm_split",)
TABLE = Path(__file__).with_name("gemm_sm90.json")
SHARED_LIMIT = 227 * 1024
_BOOL = ("false", "true")
_STEP = 128  # bytes of K that a pipeline stage holds of each row
_RELU, _TMA_STORE, _ACCUMULATE, _PAIRS = 1, 2, 4, 8  # enum Flag of the kernel
NO_MASK, WRITE_MASK, APPLY_MASK = 0, 1, 2
_NO_MAP = bytes(128)
_FORMATS = "128s128s128sPPPPPiiifii"


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
        if rows_each % 64 or rows_each * self.bn > 64 * 256 or self.bn not in (64, 128, 192, 256):
            raise ValueError(f"a consumer cannot hold its share of the tile: {self}")
        if self.bm // self.cn % 32 or self.bn // self.cm % 32:
            raise ValueError(f"the blocks of the cluster cannot divide the loads: {self}")
        if self.split > 1 and (self.cm * self.cn > 1 or self.pingpong):
            raise ValueError(f"a cluster either splits K or shares loads: {self}")
        if self.split > 1 and self.bm * self.bn * 4 > self.stages * self._stage:
            raise ValueError(f"the partial sums do not fit the stages' memory: {self}")
        if self.shared(2) > SHARED_LIMIT:
            raise ValueError(f"{self.shared(2)} bytes of shared memory, {SHARED_LIMIT} allowed: {self}")

    @property
    def _stage(self) -> int:
        return (self.bm + self.bn) * _STEP

    @property
    def cluster(self) -> int:
        return self.cm * self.cn * self.split

    def shared(self, out_bytes: int, bias_bytes: int = 2) -> int:
        """Dynamic shared memory a block, in bytes, for outputs of ``out_bytes`` and biases of ``bias_bytes`` each."""
        staged = self.consumers * self.panels * 8192 if out_bytes == 2 and self.split == 1 else 0
        return self.stages * self._stage + staged + self.consumers * self.bn * bias_bytes + 2 * self.stages * 8 + 1024

    def reads(self, x_k: bool, w_k: bool) -> bool:
        """Whether the cluster can divide loads of operands that lie this way (64-wide boxes where not K-major)."""
        return (x_k or self.bm // self.cn % 64 == 0) and (w_k or self.bn // self.cm % 64 == 0)

    def instance(self, dtype, out, x_k: bool = True, w_k: bool = True, mask: int = NO_MASK, parts: int = 1) -> str:
        """The C++ name of the kernel."""
        sizes = (self.bm, self.bn, self.consumers, self.stages, self.cm, self.cn, self.split, self.panels)
        flags = f"{_BOOL[x_k]}, {_BOOL[w_k]}, {', '.join(map(str, sizes))}, {_BOOL[self.pingpong]}, {mask}, {parts}"
        return f"gemm_sm90<{C_FLOATS[dtype]}, {C_FLOATS[out]}, {flags}>"


# Big tiles need the fewest bytes; small and split ones fill the chip when there is little to do.
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
_GROUPS = (8, 16)
# float32 operands: tf32 takes the first two of the big tiles; two sets of sums, for the split ones, need small tiles.
_TF32 = (Config(128, 256, 2, 4, cm=2), Config(128, 128, 2, 6), Config(64, 128, 1, 7))
_SPLIT = (Config(128, 128, 2, 6, cm=2), Config(128, 128, 2, 6), Config(64, 64, 1, 8))
# Outputs in float32 and masks are compiled for fewer shapes; these serve all sizes well enough.
_FEW = (CONFIGS[0], CONFIGS[5], CONFIGS[7])
_16_BIT = (torch.float16, torch.bfloat16)


def _instances() -> Iterable[str]:
    layouts = [(x_k, w_k) for x_k in (True, False) for w_k in (True, False)]
    for dtype in _16_BIT:
        for x_k, w_k in layouts:
            yield from (c.instance(dtype, dtype, x_k, w_k, NO_MASK) for c in CONFIGS if c.reads(x_k, w_k))
            yield from (c.instance(dtype, torch.float32, x_k, w_k, NO_MASK) for c in _FEW)
        yield from (c.instance(dtype, dtype, True, True, WRITE_MASK) for c in _FEW)
        yield from (c.instance(dtype, dtype, True, False, APPLY_MASK) for c in _FEW)
    yield from (c.instance(torch.float32, torch.float32) for c in _TF32)
    yield from (c.instance(torch.float16, torch.float32, parts=2) for c in _SPLIT)


INSTANCES = tuple(_instances())


def supports(x: torch.Tensor, ldx: int, w: torch.Tensor, ldw: int, precision: str) -> bool:
    """Whether the tier takes these operands: rows and addresses on 16-byte boundaries (TMA), nothing empty.

    float32 comes here for the precisions "high" and "highest" only; the latter is split first, so lies anyhow, and
    pays for the splitting only where there is enough to multiply (measured: experiments/10_gemm_bench).
    """
    (m, k), n = x.shape, w.shape[0]
    if 0 in (m, n, k) or max(m, n, k) >= 2**30:  # rows are counted in 32 bits, parts doubled
        return False
    if x.dtype == torch.float32 and precision != "high":
        return precision == "highest" and min(m, n) >= 128 and m * n * k >= 2**28
    aligned = 16 // x.element_size()
    return ldx % aligned == ldw % aligned == 0 and x.data_ptr() % 16 == w.data_ptr() % 16 == 0


def has_epilogue(x: torch.Tensor, x_k: bool, w_k: bool, out: torch.dtype, mode: int) -> bool:
    """Whether the kernel was built for this output and mask: written forward, applied by the input gradient."""
    return mode == NO_MASK or (out == x.dtype != torch.float32 and x_k and w_k == (mode == WRITE_MASK))


def candidates(m: int, n: int, k: int, dtype, layout: str, device) -> list[Config]:
    """Every configuration worth timing at a shape; ``layout`` is nt, nn, tn or tt (x then w, t: transposed)."""
    x_k, w_k = _k_major(layout)
    fitting = [c for c in CONFIGS if c.reads(x_k, w_k) and c.split * 64 <= max(k, 64)]
    several_rows = m > 8 * 128
    return [Config(**{**asdict(c), "group": g}) for c in fitting for g in (_GROUPS if several_rows else _GROUPS[:1])]


def _k_major(layout: str) -> tuple[bool, bool]:
    """``nt`` is x · wᵀ with both K-major; ``nn`` takes w as (K, N); ``tn`` takes x as (K, M) and w as (K, N)."""
    return layout[0] == "n", layout[1] == "t"


def _layout(x_k: bool, w_k: bool) -> str:
    return ("n" if x_k else "t") + ("t" if w_k else "n")


@functools.cache
def table() -> dict[tuple[str, str, str], list[tuple[tuple[int, int, int], Config]]]:
    """The measured best configurations by (gpu, dtype, layout); every row is validated as it is read."""
    rows: dict = {}
    for row in json.loads(TABLE.read_text()) if TABLE.exists() else ():
        key = row["gpu"], row["dtype"], row["layout"]
        rows.setdefault(key, []).append((tuple(row["shape"]), Config(**row["config"])))
    return rows


@functools.lru_cache(maxsize=65536)
def choose(m: int, n: int, k: int, dtype: torch.dtype, x_k: bool, w_k: bool, gpu: str, sms: int) -> Config:
    """The configuration of the nearest measured shape, by the product of the three sizes' ratios."""
    name = str(dtype).removeprefix("torch.")
    for key in ((gpu, name, _layout(x_k, w_k)), (gpu, "float16", _layout(x_k, w_k)), ("NVIDIA H200", "float16", "nt")):
        near = [(math.dist(_log(shape), _log((m, n, k))), config) for shape, config in table().get(key, ())]
        near = [(far, config) for far, config in near if config.reads(x_k, w_k)]
        if near:
            far, config = min(near, key=lambda pair: pair[0])
            if far < 4:  # within a factor of four in each of two directions, say; beyond it, count tiles
                return config
    return _biggest(_FEW, m, n, sms)


def _log(shape: tuple[int, int, int]) -> list[float]:
    return [math.log2(size) for size in shape]


def _biggest(configs: tuple[Config, ...], m: int, n: int, sms: int) -> Config:
    """The first, that is the biggest tile, that still gives most multiprocessors one; else the last."""
    fills = (c for c in configs if -(-m // c.bm) * -(-n // c.bn) >= 0.75 * sms)
    return next(fills, configs[-1])


def run(config: Config | None, x, w, bias, relu: bool, **options) -> torch.Tensor:
    """``launch_gemm`` on plain arguments, for benchmarks and tests: ``config`` None is what the face would choose."""
    from qsparse.kernels.gemm import matrix

    (x, x_k, ldx), (w, w_k, ldw) = matrix(x), matrix(w)
    y = torch.empty((x.shape[0], w.shape[0]), dtype=x.dtype, device=x.device)
    return launch_gemm(x, x_k, ldx, w, w_k, ldw, bias, y, relu=relu, config=config, **options)


def launch_gemm(
    x: torch.Tensor,
    x_k: bool,
    ldx: int,
    w: torch.Tensor,
    w_k: bool,
    ldw: int,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    relu: bool = False,
    alpha: float = 1.0,
    accumulate: bool = False,
    mask: torch.Tensor | None = None,
    mask_mode: int = NO_MASK,
    config: Config | None = None,
) -> torch.Tensor:
    """``y = act(alpha * x @ w.T + bias)`` into ``y`` (M, N) row-major, added to what is there with ``accumulate``.

    ``x_k`` and ``w_k`` say whether an operand's rows are contiguous, ``ldx`` and ``ldw`` are the strides of the other
    direction in elements. ``mask`` (M, ceil(N / 64)) int64 is written or applied by ``mask_mode``.
    """
    found = plan(x, x_k, ldx, w, w_k, ldw, y, relu=relu, accumulate=accumulate, mask_mode=mask_mode, config=config)
    return launch_plan(found, x, w, bias, y, alpha, mask)


def plan(
    x, x_k, ldx, w, w_k, ldw, y, *, relu=False, accumulate=False, mask_mode=NO_MASK, config: Config | None = None
) -> _Plan:
    """What ``launch_gemm`` would launch; the same for all arrays of these shapes, strides and dtypes."""
    (m, k), n = x.shape, w.shape[0]
    kinds = (x.dtype, y.dtype, x_k, w_k, mask_mode)
    return _plan(x.device.index, m, n, k, ldx, ldw, *kinds, relu, accumulate, y.data_ptr() % 16, config)


def launch_plan(found: _Plan, x, w, bias, y, alpha: float, mask=None) -> torch.Tensor:
    """Launch a plan on arrays of its kind."""
    y_address = y.data_ptr()
    arguments = (
        tensor_map(x.data_ptr(), *found.x_map),
        tensor_map(w.data_ptr(), *found.w_map),
        tensor_map(y_address, *found.y_map) if found.y_map else _NO_MAP,
        _address(bias),
        y_address,
        _address(mask),
        *(0, 0),
        *found.sizes,
        alpha,
        found.flags,
        found.group,
    )
    launch(x.device, SOURCE, found.instance, _FORMATS, arguments, found.grid, found.block, found.shared)
    return y


@dataclass(frozen=True)
class _Plan:
    """All of a launch that does not depend on where the arrays lie; the maps lack their addresses."""

    sizes: tuple[int, int, int]
    instance: str
    grid: int
    block: int
    shared: int
    x_map: tuple
    w_map: tuple
    y_map: tuple | None
    flags: int
    group: int


@functools.lru_cache(maxsize=4096)
def _plan(device, m, n, k, ldx, ldw, dtype, out, x_k, w_k, mask_mode, relu, accumulate, y_offset, config) -> _Plan:
    name, sms = multiprocessors(device)
    if config is None and out == dtype != torch.float32 and mask_mode == NO_MASK:
        config = choose(m, n, k, dtype, x_k, w_k, name, sms)
    elif config is None:
        config = _biggest(_TF32 if dtype == torch.float32 else _FEW, m, n, sms)
    step = _STEP // dtype.itemsize
    flags = (_RELU if relu else 0) | (_ACCUMULATE if accumulate else 0) | _pairs(out, n, y_offset)
    y_map = None
    if out != torch.float32 and config.split == 1 and n % 8 == 0 and y_offset == 0:
        y_map = (out, m, n, n, (64, 64))
        flags |= _TMA_STORE
    return _Plan(
        (m, n, k),
        config.instance(dtype, out, x_k, w_k, mask_mode),
        *_grid(config, m, n, sms),
        config.shared(out.itemsize, dtype.itemsize),
        (dtype, m, k, ldx, (config.bm // config.cn, step)) if x_k else (dtype, k, m, ldx, (64, 64)),
        (dtype, n, k, ldw, (config.bn // config.cm, step)) if w_k else (dtype, k, n, ldw, (64, 64)),
        y_map,
        flags,
        config.group,
    )


def _pairs(out: torch.dtype, n: int, y_offset: int) -> int:
    """The flag that says that two neighbouring outputs may be stored at once."""
    return _PAIRS if n % 2 == 0 and y_offset % (2 * out.itemsize) == 0 else 0


def _grid(config: Config, m: int, n: int, sms: int) -> tuple[int, int]:
    """Blocks and threads a block: all tiles at once where K is split, else as many clusters as the chip holds."""
    tiles = -(-m // (config.bm * config.cm)) * -(-n // (config.bn * config.cn))
    clusters = tiles if config.split > 1 else min(tiles, sms // config.cluster)
    return clusters * config.cluster, 128 * (config.consumers + 1)


def launch_split(x, ldx: int, w, ldw: int, bias, y, *, relu: bool = False, alpha: float = 1.0) -> torch.Tensor:
    """The same for float32 ``x (M, K)`` and ``w (N, K)``, both K-major, as three products of halves (gemm_split.cu)."""
    (m, k), n = x.shape, w.shape[0]
    sms = multiprocessors(x.device.index)[1]
    config = _biggest(_SPLIT, m, n, sms)
    x_parts, x_scale = _split(x, ldx)
    w_parts, w_scale = _split(w, ldw)
    maps = (
        tensor_map(parts.data_ptr(), parts.dtype, 2 * rows, k, parts.shape[2], (box, 64))
        for parts, rows, box in ((x_parts, m, config.bm // config.cn), (w_parts, n, config.bn // config.cm))
    )
    arguments = (
        *(*maps, _NO_MAP, _address(bias), y.data_ptr(), 0, x_scale.data_ptr(), w_scale.data_ptr()),
        *(m, n, k, alpha, (_RELU if relu else 0) | _pairs(y.dtype, n, y.data_ptr() % 16), config.group),
    )
    instance = config.instance(torch.float16, torch.float32, parts=2)
    grid, block = _grid(config, m, n, sms)
    launch(x.device, SOURCE, instance, _FORMATS, arguments, grid=grid, block=block, shared=config.shared(4, 4))
    return y


def _split(a: torch.Tensor, ld: int) -> tuple[torch.Tensor, torch.Tensor]:
    """High and low halves (2, R, K rounded up to 8) of ``a`` (R, K), and the scale of each row."""
    r, k = a.shape
    parts = torch.empty((2, r, -(-k // 8) * 8), dtype=torch.float16, device=a.device)
    scale = torch.empty(r, dtype=torch.float32, device=a.device)
    arguments = (a.data_ptr(), ld, parts.data_ptr(), parts.shape[2], scale.data_ptr(), r, k)
    launch(a.device, SPLIT_SOURCE, "gemm_split", "PqPqPqq", arguments, grid=r, block=256)
    return parts, scale


def _address(a: torch.Tensor | None) -> int:
    return 0 if a is None else a.data_ptr()
