"""The host side of ``gemm_int8_sm90.cu`` and ``gemm_fp8_sm90.cu``: which operands they take, and the launch.

The faces are :mod:`qsparse.kernels.gemm_int8` and :mod:`qsparse.kernels.gemm_fp8`; they hand over what
:func:`supports` accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch

from qsparse.kernels import _gemm_sm90_configs as float_configs
from qsparse.kernels._gemm_int8_epilogue import FORMAT, Epilogue
from qsparse.kernels._gemm_sm90_configs import NO_MAP, TABLE, Config, grid, output_map
from qsparse.kernels._load import multiprocessors, prepare, tensor_map

__all__ = ["TABLE"]  # found here too

SOURCE, FP8_SOURCE = "gemm_int8_sm90.cu", "gemm_fp8_sm90.cu"
FP8 = torch.float8_e4m3fn
INPUTS = {torch.int8: "signed char", torch.uint8: "unsigned char"}
OUTPUTS = {
    torch.float16: "__half",
    torch.bfloat16: "__nv_bfloat16",
    torch.float32: "float",
    torch.int32: "int",
    torch.int8: "signed char",
    torch.uint8: "unsigned char",
}
_FORMATS = f"128s128s128sP{FORMAT}iiiii"
_TMA_STORE, _PAIRS = 2, 8  # enum Flag of the pipeline
COLUMN_BYTES = 12  # scale, bias and sum of a column of weights, as in common/scale_epilogue.cuh
_STEP = 128

# The float product's, with room for the columns' scales; and more ways to divide K, which is half as many stages long.
CONFIGS = (
    Config(128, 256, 2, 3, cm=2, panels=4),
    Config(128, 256, 2, 4, panels=1),
    Config(128, 256, 2, 3, panels=4),
    Config(128, 128, 2, 6, cn=2, panels=1, pingpong=True),
    Config(128, 128, 2, 6, panels=1, pingpong=True),
    Config(128, 128, 2, 5, cm=2, panels=3, pingpong=True),
    Config(128, 64, 2, 6, panels=1),
    Config(128, 64, 2, 6, cn=2, panels=1),
    Config(64, 128, 1, 7, panels=1),
    Config(64, 64, 1, 8, panels=1),
    Config(64, 64, 1, 6, split=2, panels=1),
    Config(64, 128, 1, 4, split=4, panels=1),
    Config(256, 128, 2, 3, cn=2, panels=4),
)
# Other outputs, and unsigned activations, are compiled for fewer shapes; these serve all sizes well enough.
FEW = (CONFIGS[0], CONFIGS[8], CONFIGS[9], CONFIGS[10])
_BYTE = (CONFIGS[0], CONFIGS[8], CONFIGS[10])  # a panel of 8-bit outputs is 128 columns wide
_LAYER = (CONFIGS[1], CONFIGS[3])  # and these, where one int8 layer of a network feeds another
_HALVES = (torch.float16, torch.bfloat16)


def instance(config: Config, x: torch.dtype, out: torch.dtype) -> str:
    """The C++ name of the kernel."""
    if x == FP8:
        return f"gemm_fp8_sm90<{OUTPUTS[out]}, {config.tile_arguments}>"
    return f"gemm_int8_sm90<{INPUTS[x]}, {OUTPUTS[out]}, {config.tile_arguments}>"


def configs(x: torch.dtype, out: torch.dtype) -> tuple[Config, ...]:
    """The configurations compiled for these types."""
    more = _LAYER if x == torch.int8 else ()
    if out.itemsize == 1:
        return _BYTE + more
    if out == torch.float32:
        return FEW + more
    return CONFIGS if x != torch.uint8 and out in _HALVES else FEW


INSTANCES = tuple(instance(c, x, out) for x in INPUTS for out in OUTPUTS for c in configs(x, out))
FP8_INSTANCES = tuple(instance(c, FP8, out) for out in (*_HALVES, torch.float32) for c in configs(FP8, out))


def supports(x: torch.Tensor, ldx: int, w: torch.Tensor, ldw: int, y: torch.Tensor) -> bool:
    """Whether the tier takes these operands: rows and addresses on 16-byte boundaries (TMA), nothing empty."""
    (m, k), n = x.shape, w.shape[0]
    aligned = ldx % 16 == ldw % 16 == x.data_ptr() % 16 == w.data_ptr() % 16 == 0
    return aligned and 0 not in (m, n, k) and max(m, n, k) < 2**30 and y.dtype in OUTPUTS


def candidates(
    m: int, n: int, k: int, x: torch.dtype = torch.int8, layout: str = "nt", device=None, out: torch.dtype = _HALVES[1]
) -> list[Config]:
    """Every configuration worth timing at a shape (the layout is always nt, and all devices alike)."""
    return float_configs.walked((c for c in configs(x, out) if c.split * _STEP <= max(k, _STEP)), m)


def run(config: Config | None, x, w, bias, relu: bool) -> torch.Tensor:
    """``launch_gemm`` on plain row-major arguments with bfloat16 outputs, for benchmarks and tests."""
    y = torch.empty((x.shape[0], w.shape[0]), dtype=torch.bfloat16, device=x.device)
    launch_gemm(x, x.stride(0), w, w.stride(0), y, Epilogue(bias=bias, relu=relu), config)
    return y


def choose(m: int, n: int, k: int, x: torch.dtype, out: torch.dtype, gpu: str, sms: int) -> Config:
    """The fastest configuration of this very shape, if that is compiled for these types; else the one of least cost."""
    measured = float_configs.table().get((gpu, "int8", "nt"), {}).get((m, n, k))
    if measured is not None and float_configs.unwalked(measured) in configs(x, out):
        return measured
    return float_configs.fastest(candidates(m, n, k, x, out=out), m, n, k, x, out, gpu, sms)


@dataclass(frozen=True, eq=False)
class _Plan:
    """All of a launch that does not depend on where the arrays lie."""

    launch: Callable[[tuple], None]
    x_map: tuple
    w_map: tuple
    y_map: tuple | None
    sizes: tuple[int, ...]


def launch_gemm(
    x: torch.Tensor,
    ldx: int,
    w: torch.Tensor,
    ldw: int,
    y: torch.Tensor,
    epilogue: Epilogue,
    config: Config | None = None,
) -> None:
    """Write the product of ``x`` (M, K) and ``w`` (N, K) into ``y`` (M, N), row-major.

    ``x`` is int8 or uint8 and ``w`` int8, or both are e4m3. ``ldx`` and ``ldw`` are the strides of rows in bytes;
    ``config`` None takes the one that suits the shape.
    """
    (m, k), n = x.shape, w.shape[0]
    found = _plan(x.device.index, m, n, k, ldx, ldw, x.dtype, y.dtype, y.data_ptr() % 16, config)
    x_map, w_map = tensor_map(x.data_ptr(), *found.x_map), tensor_map(w.data_ptr(), *found.w_map)
    y_map = tensor_map(y.data_ptr(), *found.y_map) if found.y_map else NO_MAP
    found.launch((x_map, w_map, y_map, y.data_ptr(), epilogue.pack(y.dtype), *found.sizes))


@functools.lru_cache(maxsize=4096)
def _plan(device, m, n, k, ldx, ldw, x, out, y_offset, config) -> _Plan:
    gpu, sms = multiprocessors(device)
    config = config or choose(m, n, k, x, out, gpu, sms)
    flags = _PAIRS if n % 2 == 0 and y_offset % (2 * out.itemsize) == 0 else 0
    y_map = output_map(config, out, m, n, y_offset)
    flags |= _TMA_STORE if y_map else 0
    shared = config.shared(COLUMN_BYTES)
    return _Plan(
        prepare(
            device,
            FP8_SOURCE if x == FP8 else SOURCE,
            instance(config, x, out),
            _FORMATS,
            *grid(config, m, n, sms),
            shared,
        ),
        (x, m, k, ldx, (config.bm // config.cn, _STEP)),
        (x, n, k, ldw, (config.bn // config.cm, _STEP)),
        y_map,
        (m, n, k, flags, config.group),
    )
