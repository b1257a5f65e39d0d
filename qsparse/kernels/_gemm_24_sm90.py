"""The host side of ``gemm_24_sm90.cu`` and ``gemm_int8_24_sm90.cu``: which operands they take, and the launch.

The faces are :mod:`qsparse.kernels.gemm_24` and :mod:`qsparse.kernels.gemm_int8_24`; they hand over what
:func:`supports` accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qsparse.kernels import _two_four
from qsparse.kernels._face import C_FLOATS, matrix
from qsparse.kernels._gemm_int8_epilogue import FORMAT, Epilogue
from qsparse.kernels._load import launch, multiprocessors, prepare, tensor_map

SOURCE, INT8_SOURCE = "gemm_24_sm90.cu", "gemm_int8_24_sm90.cu"
INPUTS = {torch.int8: "signed char", torch.uint8: "unsigned char"}
OUTPUTS = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.int32: "int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}
_HALVES = (torch.float16, torch.bfloat16)
_RELU, _TMA_STORE = 1, 2  # enum Flag of the pipeline
_SHARED_LIMIT = 227 * 1024
_X_BYTES, _W_BYTES = 128, 64  # of a row of x and of values in a stage
_PIECES, _PIECE_BYTES = {1: 128, 2: 64}, 8  # of packed metadata for 64 outputs and a stage, by the size of a value
_NO_MAP = bytes(128)


@dataclass(frozen=True)
class Config:
    """One instance of the kernel; the names are its template parameters, explained in ``common/gemm_24_sm90.cuh``.

    ``bo x bb`` outputs by batch rows are a block's tile, ``co`` the blocks of a cluster that share loads of x,
    ``split`` those that divide K, and ``group`` the tiles along the batch that are walked together.
    """

    bo: int
    bb: int
    consumers: int
    stages: int
    co: int = 1
    split: int = 1
    group: int = 8

    def __post_init__(self):
        """Raise ValueError for what the kernel's static assertions or a Hopper block would refuse."""
        if self.bo % (64 * self.consumers) or self.bb not in (16, 64, 128, 256):
            raise ValueError(f"no wgmma tiles of 64 outputs by {self.bb} divide the tile: {self}")
        if self.bo // (64 * self.consumers) * self.bb > 256:
            raise ValueError(f"a consumer cannot hold its share of the tile: {self}")
        if self.bb // self.co % 8:
            raise ValueError(f"the blocks of the cluster cannot divide the loads: {self}")
        if self.split > 1 and self.co > 1:
            raise ValueError(f"a cluster either splits K or shares loads: {self}")
        if self.split > 1 and self.bo * self.bb * 4 > self.stages * (self.bb * _X_BYTES + self.bo * _W_BYTES):
            raise ValueError(f"the partial sums do not fit the stages' memory: {self}")
        if self.loads(1) > _SHARED_LIMIT:
            raise ValueError(f"{self.loads(1)} bytes of shared memory, {_SHARED_LIMIT} allowed: {self}")

    @property
    def cluster(self) -> int:
        return self.co * self.split

    def loads(self, size: int) -> int:
        """Shared memory in bytes, but for y, where values take ``size`` bytes; 8-bit products keep scales there."""
        metadata = self.bo // 64 * _PIECES[size] * _PIECE_BYTES
        stages = self.stages * (self.bb * _X_BYTES + self.bo * _W_BYTES + metadata + 16)
        return stages + (self.consumers * self.bb * 8 if size == 1 else 0) + 1024

    def panels(self, size: int, out_bytes: int) -> tuple[int, int]:
        """The batch rows of a panel of y, and the bytes of all panels: none where they lie in a stage of x."""
        row = self.consumers * 2 * 64 * out_bytes
        if self.loads(size) + 32 * row <= _SHARED_LIMIT:
            return 32, 32 * row
        return min(64, self.bb * _X_BYTES // row), 0

    def shared(self, size: int, out_bytes: int) -> int:
        """Dynamic shared memory a block, in bytes, for values of ``size`` bytes and outputs of ``out_bytes``."""
        return self.loads(size) + (self.panels(size, out_bytes)[1] if self.split == 1 else 0)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) product."""
        return -(-n // self.bo) * -(-m // self.bb)

    @property
    def tile_arguments(self) -> str:
        """The template arguments after the types."""
        sizes = (self.bo, self.bb, self.consumers, self.stages, self.co, self.split)
        return ", ".join(map(str, sizes))

    def grid(self, m: int, n: int, sms: int) -> tuple[int, int]:
        """Blocks and threads a block: all tiles at once where K is split, else as many clusters as the chip holds."""
        tiles = -(-n // (self.bo * self.co)) * -(-m // self.bb)
        clusters = tiles if self.split > 1 else min(tiles, sms // self.cluster)
        return clusters * self.cluster, 128 * (self.consumers + 1)


BIG = Config(128, 256, 2, 5, co=2)
ALONE = Config(128, 256, 2, 5)  # where no block computes a second tile
SQUARE = Config(128, 128, 2, 8)
SMALL = Config(128, 64, 2, 10)
FEW_ROWS, FEWER_ROWS = Config(64, 64, 1, 7, split=3), Config(64, 16, 1, 24, split=2)
CONFIGS = (BIG, ALONE, SQUARE, SMALL, FEW_ROWS, FEWER_ROWS)
# Outputs but in 16 bits, and unsigned activations, are compiled for fewer shapes; these serve all sizes well enough.
FEW = (BIG, Config(64, 128, 1, 8))


def instance(config: Config, x: torch.dtype, out: torch.dtype) -> str:
    """The C++ name of the kernel."""
    if x in INPUTS:
        return f"gemm_int8_24_sm90<{INPUTS[x]}, {OUTPUTS[out]}, {config.tile_arguments}>"
    return f"gemm_24_sm90<{C_FLOATS[x]}, {OUTPUTS[out]}, {config.tile_arguments}>"


def configs(x: torch.dtype, out: torch.dtype) -> tuple[Config, ...]:
    """The configurations compiled for these types."""
    return CONFIGS if out in _HALVES and x != torch.uint8 else FEW


_PACK = {1: "pack_24<1>", 2: "pack_24<2>"}  # by the size of a value
INSTANCES = (
    _PACK[2],
    *(instance(c, x, out) for x in _HALVES for out in (x, torch.float32) for c in configs(x, out)),
)
INT8_INSTANCES = (_PACK[1], *(instance(c, x, out) for x in INPUTS for out in OUTPUTS for c in configs(x, out)))


def supports(x: torch.Tensor, n: int, out: torch.dtype) -> bool:
    """Whether the tier takes activations like these for ``n`` outputs: no float32, nothing empty, no int64 out."""
    m, k = x.shape
    return x.dtype != torch.float32 and out in OUTPUTS and 0 not in (m, n, k) and max(m, n, k) < 2**30


def choose(m: int, n: int, k: int, built: tuple[Config, ...], sms: int) -> Config:
    """The configuration of ``built`` for a shape; one overtook the other at these bounds on an H200, 2026-11-30."""
    if built is FEW:
        return FEW[0] if FEW[0].tiles(m, n) >= 0.75 * sms else FEW[1]
    if m <= 64 and k >= 2048:
        return FEWER_ROWS if m <= 16 else FEW_ROWS
    tiles = BIG.tiles(m, n)
    if tiles >= 0.75 * sms:
        return ALONE if tiles <= sms else BIG
    return SQUARE if SQUARE.tiles(m, n) >= 0.75 * sms else SMALL


@dataclass(frozen=True, eq=False)
class _Plan:
    """All of a launch that does not depend on where the arrays lie; the maps lack their addresses."""

    launch: Callable[[tuple], None]
    x_map: tuple
    w_map: tuple
    y_map: tuple | None
    sizes: tuple[int, ...]


def launch_gemm(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    y: torch.Tensor,
    epilogue: Epilogue | tuple[torch.Tensor | None, bool],
    config: Config | None = None,
) -> None:
    """Write the product of ``x`` (M, K) and the 2:4 matrix (N, K) into ``y`` (M, N), row-major.

    ``epilogue`` is that of ``gemm_int8``, or (bias, relu) for floats; ``config`` None takes the one that suits. What
    the kernel wants of the weights in another layout is made once and kept.
    """
    (m, k), n = x.shape, values.shape[0]
    x, values = _two_four.on_boundaries(x), _two_four.kept(values, _two_four.on_boundaries)
    packed = _two_four.kept(metadata, _pack, values.element_size())
    relu = not isinstance(epilogue, Epilogue) and epilogue[1]
    strides = x.stride(0), values.stride(0)
    found = _plan(x.device.index, m, n, k, *strides, x.dtype, y.dtype, y.data_ptr() % 16, relu, config)
    x_map, w_map = tensor_map(x.data_ptr(), *found.x_map), tensor_map(values.data_ptr(), *found.w_map)
    y_map = tensor_map(y.data_ptr(), *found.y_map) if found.y_map else _NO_MAP
    if isinstance(epilogue, Epilogue):
        arguments: tuple = (y.data_ptr(), epilogue.pack(y.dtype))
    else:
        bias = epilogue[0]
        arguments = (0 if bias is None else bias.data_ptr(), y.data_ptr())
    found.launch((x_map, w_map, packed.data_ptr(), y_map, *arguments, *found.sizes))


def _pack(metadata: torch.Tensor, size: int) -> torch.Tensor:
    """Metadata (N, Kp / 8) in the order in which the kernel's threads read them, for values of ``size`` bytes."""
    metadata, _, stride = matrix(metadata, k_major=True)
    n, row_bytes = metadata.shape
    stages = -(-row_bytes * 8 * size // _X_BYTES)
    pieces = -(-n // 64) * stages * _PIECES[size]
    packed = torch.empty((pieces, _PIECE_BYTES), dtype=torch.uint8, device=metadata.device)
    arguments = (metadata.data_ptr(), stride, packed.data_ptr(), n, row_bytes, stages)
    source = INT8_SOURCE if size == 1 else SOURCE
    launch(metadata.device, source, _PACK[size], "PqPiii", arguments, grid=-(-pieces // 256), block=256)
    return packed


@functools.lru_cache(maxsize=4096)
def _plan(device, m, n, k, ldx, ldv, x, out, y_offset, relu, config) -> _Plan:
    _, sms = multiprocessors(device)
    config = config or choose(m, n, k, configs(x, out), sms)
    int8 = x in INPUTS
    step = _X_BYTES // x.itemsize
    wide = -(-k // 8) * 8
    size = 1 if int8 else 2
    y_map = None
    if config.split == 1 and n * out.itemsize % 16 == 0 and not y_offset:
        width = min(64, 128 // out.itemsize)
        y_map = (out, m, n, n, (config.panels(size, out.itemsize)[0], width), True, width * out.itemsize)
    flags = (_RELU if relu else 0) | (_TMA_STORE if y_map else 0)
    return _Plan(
        prepare(
            device,
            INT8_SOURCE if int8 else SOURCE,
            instance(config, x, out),
            f"128s128sP128sP{FORMAT}iiiii" if int8 else "128s128sP128sPPiiiii",
            *config.grid(m, n, sms),
            config.shared(size, out.itemsize),
        ),
        (x, m, k, ldx, (config.bb // config.co, step)),
        (torch.int8 if int8 else x, n, wide // 2, ldv, (config.bo, step // 2), False, 64),
        y_map,
        (m, n, k, flags, config.group),
    )
