"""The host side of ``spmm_csr_product_sm90.cu``: the dense product of halves, right where CSR and dense W differ.

The face of the operation is :mod:`qsparse.kernels.spmm_csr`, for which :mod:`._spmm_expand_sm90` writes W out;
:mod:`qsparse.kernels.spmm_bitmap` uses it too.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import replace

import torch

from qsparse.kernels import _gemm_single_sm90
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._gemm_single_sm90 import Single
from qsparse.kernels._gemm_sm90_configs import CONFIGS, NO_MAP, Config, fastest, grid, output_map, walked
from qsparse.kernels._load import following, launch, multiprocessors, tensor_map

SOURCE = "spmm_csr_product_sm90.cu"
DTYPES = (torch.float16, torch.bfloat16)
_WHOLE = tuple(config for config in CONFIGS if config.split == 1)
POSSIBLE = (*_WHOLE, *_gemm_single_sm90.CONFIGS)
_CSR = struct.Struct("@PqPPPi4x")  # the struct Csr
_TALL = 1024  # rows of x: with fewer, a block of the two may have nothing to do
_RELU, _TMA_STORE, _PAIRS = 1, 2, 8  # of the pipeline's flags


def instances() -> tuple[str, ...]:
    """All kernels of the source."""
    return tuple(dict.fromkeys(_instance(config, dtype) for dtype in DTYPES for config in POSSIBLE))


def _instance(config: Config | Single, dtype: torch.dtype) -> str:
    if isinstance(config, Single):
        sizes = (config.bm, config.bn, config.consumers, config.stages, config.cm, config.cn, config.split)
        return f"spmm_csr_product_single<{C_FLOATS[dtype]}, {', '.join(map(str, sizes))}>"
    return f"spmm_csr_product<{C_FLOATS[dtype]}, {config.tile_arguments}>"


def takes(x: torch.Tensor, n: int) -> bool:
    """Whether x (M, K) is of halves whose rows are contiguous and start on 16 bytes, as the copy engine has them."""
    aligned = x.stride(1) == 1 and x.stride(0) >= x.shape[1] and not (x.data_ptr() % 16 or x.stride(0) % 8)
    return x.dtype in DTYPES and aligned and min(*x.shape, n) > 0 and max(*x.shape, n) < 2**30


@functools.lru_cache(maxsize=4096)
def choose(m: int, n: int, k: int, dtype: torch.dtype, gpu: str, sms: int) -> Config | Single:
    """The configuration that should take the least time where W is dense, of those that are built.

    W has just been written and is in L2, which changes little: on an H200 the choice is within 2 % of the best in the
    mean. But where there are several rounds of the biggest tile, two blocks share what they read of W.
    """
    single = [config for config in _gemm_single_sm90.CONFIGS if config.suits(m, n, k)]
    found = fastest([*walked(_WHOLE, m), *single], m, n, k, dtype, dtype, gpu, sms)
    if isinstance(found, Config) and (found.bm, found.bn) == (128, 256) and m >= _TALL:
        return replace(found, cm=2, group=8)
    return found


def blocks(config: Config, m: int, n: int, sms: int) -> int:
    """As few blocks as need no round of tiles more than all would, if those are nearly all.

    A few multiprocessors without work leave the others power, which bounds a large product; many would be missed where
    memory bounds it.
    """
    every, tiles = grid(config, m, n, sms)[0], config.tiles(m, n)
    fewest = -(-tiles // -(-tiles * config.cluster // every)) * config.cluster
    return fewest if 16 * fewest >= 15 * every else every


def product(
    x, w, values, cols, row_offsets, bias, n: int, relu: bool, config: Config | Single | None = None
) -> torch.Tensor:
    """``act(x @ W.T + bias)`` (M, N) row-major, W also as ``w`` (N, K), by the kernel launched just before.

    ``takes(x, n)``, rows of ``w`` on 16 bytes; the other arrays are contiguous. Without CSR (None for each of its
    arrays) what is not stored is multiplied as a zero. ``config`` is chosen where None.
    """
    (m, k), name_and_sms = x.shape, multiprocessors(x.device.index)
    config = config or choose(m, n, k, x.dtype, *name_and_sms)
    y = torch.empty((m, n), dtype=x.dtype, device=x.device)
    entries = (0 if a is None else a.data_ptr() for a in (values, cols, row_offsets))
    csr = _CSR.pack(x.data_ptr(), x.stride(0), *entries, cols is not None and cols.dtype == torch.uint16)
    maps = (
        tensor_map(x.data_ptr(), x.dtype, m, k, x.stride(0), (config.bm // config.cn, 64)),
        tensor_map(w.data_ptr(), w.dtype, n, k, w.stride(0), (config.bn // config.cm, 64)),
    )
    bias_address = 0 if bias is None else bias.data_ptr()
    arrays = (bias_address, y.data_ptr(), csr)
    flags, instance = _RELU * relu | (0 if n % 2 else _PAIRS), _instance(config, x.dtype)
    if isinstance(config, Single):
        flags |= 0 if n % 8 else _gemm_single_sm90.WIDE
        arguments = (*maps, *arrays, m, n, k, flags, *config.walk(m, n, k))
        size, threads = config.tiles(m, n) * config.cluster, 128 * config.consumers + 32
        formats = f"128s128sPP{_CSR.size}siiiiiI"
    else:
        y_map = output_map(config, y.dtype, m, n, y.data_ptr() % 16)
        flags |= _TMA_STORE if y_map else 0
        maps = (*maps, tensor_map(y.data_ptr(), *y_map) if y_map else NO_MAP)
        arguments = (*maps, *arrays, m, n, k, flags, config.group)
        size, threads = blocks(config, m, n, name_and_sms[1]), 128 * (config.consumers + 1)
        formats = f"128s128s128sPP{_CSR.size}siiiii"
    with following():
        launch(x.device, SOURCE, instance, formats, arguments, grid=size, block=threads, shared=config.shared())
    return y
