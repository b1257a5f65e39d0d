"""The host side of ``gemm_weight_only_sm90.cu``: the tiles of ``sm80``, their parts of K added up in a cluster.

The face of the operation is :mod:`qsparse.kernels.gemm_weight_only`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools

import torch

from qsparse.kernels import _gemm_weight_only_sm80 as sm80
from qsparse.kernels._load import prepare

SOURCE = "gemm_weight_only_sm90.cu"
_DTYPES = (torch.float16, torch.bfloat16)
_SPLITS = 8  # blocks of a cluster
CONFIGS = sm80.CONFIGS
INSTANCES = tuple(config.instance(dtype, "sm90") for config in CONFIGS for dtype in _DTYPES)

supports = sm80.supports


def launch_gemm(
    x: torch.Tensor,
    ldx: int,
    w: torch.Tensor,
    ldw: int,
    scale: torch.Tensor,
    group: int | None,
    bias: torch.Tensor | None,
    y: torch.Tensor,
    *,
    relu: bool,
    config: sm80.Config | None = None,
    split: int | None = None,
) -> None:
    """Launch ``y = act(x @ (scale * q).T + bias)`` on the device of ``x``; see ``_gemm_weight_only_sm80.launch_gemm``.

    ``split`` blocks, at most 8, divide K.
    """
    (m, k), n = x.shape, w.shape[0]
    if config is None:
        config, split = choose(8 if w.dtype == torch.int8 else 4, m, n, k, *sm80.limits(x.device.index))
    split = split or 1
    launch = prepare(
        *(x.device.index, SOURCE, config.instance(x.dtype, "sm90"), sm80.PRODUCT),
        *(config.tiles_of(m, n) * split, config.threads, config.shared),
        cluster=split,
    )
    launch((sm80.product(x, ldx, w, ldw, scale, group, bias, y, relu, split),))


def is_faster(x: torch.Tensor, w: torch.Tensor) -> bool:
    """Whether this tier is the faster one: where two blocks share a tile, as measured on an NVIDIA H200, 2026-11-30.

    More blocks of a cluster find room on the chip too late, and a tile of one block is the same in both tiers.
    """
    bits = 8 if w.dtype == torch.int8 else 4
    return choose(bits, x.shape[0], w.shape[0], x.shape[1], *sm80.limits(x.device.index))[1] == 2


@functools.lru_cache(maxsize=4096)
def choose(bits: int, m: int, n: int, k: int, *limits: int) -> tuple[sm80.Config, int]:
    """The tile and the split of K that are best by the model of the tier ``sm80``."""
    config, split = sm80.choose(bits, m, n, k, *limits)
    return config, min(split, _SPLITS)
