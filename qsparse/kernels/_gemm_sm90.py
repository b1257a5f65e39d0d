"""The host side of ``gemm_sm90.cu`` and ``gemm_single_sm90.cu``: which operands they take, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from qsparse.kernels import _gemm_single_sm90
from qsparse.kernels._face import matrix
from qsparse.kernels._gemm_costs import STEP
from qsparse.kernels._gemm_single_sm90 import Single
from qsparse.kernels._gemm_sm90_configs import (
    APPLY_MASK,
    CONFIGS,
    FEW,
    INSTANCES,
    NO_MAP,
    NO_MASK,
    SPLIT,
    TABLE,
    WRITE_MASK,
    Config,
    candidates,
    choose,
    fastest,
    grid,
    layout_of,
    output_map,
    walked,
)
from qsparse.kernels._load import Launch, launch, multiprocessors, prepare, tensor_map

__all__ = ["APPLY_MASK", "CONFIGS", "INSTANCES", "TABLE", "Config", "candidates"]  # found here too

SOURCE, SPLIT_SOURCE = "gemm_sm90.cu", "gemm_split.cu"
SPLIT_INSTANCES = ("gemm_split",)
_RELU, _TMA_STORE, _ACCUMULATE, _PAIRS = 1, 2, 4, 8  # enum Flag of the kernel
_FORMATS = "128s128s128sPPPPPiiifii"


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


def on_boundaries(a: torch.Tensor, k_major: bool, ld: int) -> tuple[torch.Tensor, int]:
    """A matrix as ``matrix`` gives it and its stride, copied if its rows (columns, unless ``k_major``) do not lie on
    16-byte boundaries."""
    if (a.data_ptr() | ld * a.element_size()) % 16 == 0:
        return a, ld
    lines, step = a if k_major else a.t(), 16 // a.element_size()
    ld = -(-lines.shape[1] // step) * step
    copied = torch.empty((lines.shape[0], ld), dtype=a.dtype, device=a.device)[:, : lines.shape[1]].copy_(lines)
    return copied if k_major else copied.t(), ld


def has_epilogue(x: torch.Tensor, x_k: bool, w_k: bool, out: torch.dtype, mode: int) -> bool:
    """Whether the kernel was built for this output and mask: written forward, applied by the input gradient."""
    return mode == NO_MASK or (out == x.dtype != torch.float32 and x_k and w_k == (mode == WRITE_MASK))


def run(config: Config | Single | None, x, w, bias, relu: bool, **options) -> torch.Tensor:
    """``launch_gemm`` on plain arguments, for benchmarks and tests: ``config`` None is what the face would choose."""
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
    config: Config | Single | None = None,
) -> torch.Tensor:
    """``y = act(alpha * x @ w.T + bias)`` into ``y`` (M, N) row-major, added to what is there with ``accumulate``.

    ``x_k`` and ``w_k`` say whether an operand's rows are contiguous, ``ldx`` and ``ldw`` are the strides of the other
    direction in elements. ``mask`` (M, ceil(N / 64)) int64 is written or applied by ``mask_mode``.
    """
    found = plan(x, x_k, ldx, w, w_k, ldw, y, relu=relu, accumulate=accumulate, mask_mode=mask_mode, config=config)
    return launch_plan(found, x, w, bias, y, alpha, mask)


def plan(x, x_k, ldx, w, w_k, ldw, y, *, relu=False, accumulate=False, mask_mode=NO_MASK, config=None) -> _Plan:
    """What ``launch_gemm`` would launch; the same for all arrays of these shapes, strides and dtypes."""
    (m, k), n = x.shape, w.shape[0]
    kinds = (x.dtype, y.dtype, x_k, w_k, mask_mode)
    return _plan(x.device.index, m, n, k, ldx, ldw, *kinds, relu, accumulate, y.data_ptr() % 16, config)


def launch_plan(found: _Plan, x, w, bias, y, alpha: float, mask=None) -> torch.Tensor:
    """Launch a plan on arrays of its kind."""
    places = (
        *(x.data_ptr(), w.data_ptr(), y.data_ptr()),
        *(0 if bias is None else bias.data_ptr(), 0 if mask is None else mask.data_ptr(), alpha),
    )
    (found.bound.get(places) or found.bind(*places))()
    return y


@dataclass(frozen=True, eq=False)
class _Plan:
    """All of a launch that does not depend on where the arrays lie; the maps lack their addresses."""

    launch: Launch
    sizes: tuple[int, int, int]
    x_map: tuple
    w_map: tuple
    y_map: tuple | None
    flags: int
    walk: tuple[int, ...]  # how the tiles are counted: rows walked together; of a single kernel, a column and 1 / it
    single: bool
    bound: dict = field(default_factory=dict)  # launches at places seen: arrays come back to the same ones

    def bind(self, x: int, w: int, y: int, bias: int, mask: int, alpha: float) -> Callable[[], None]:
        """The launch with the arrays at these addresses."""
        if len(self.bound) >= 64:
            self.bound.clear()
        x_map, w_map = tensor_map(x, *self.x_map), tensor_map(w, *self.w_map)
        y_map = tensor_map(y, *self.y_map) if self.y_map else NO_MAP
        arrays = (x_map, w_map, bias, y) if self.single else (x_map, w_map, y_map, bias, y, mask, 0, 0)
        bound = self.launch.bind((*arrays, *self.sizes, alpha, self.flags, *self.walk))
        self.bound[x, w, y, bias, mask, alpha] = bound
        return bound


@functools.lru_cache(maxsize=4096)
def _plan(device, m, n, k, ldx, ldw, dtype, out, x_k, w_k, mask_mode, relu, accumulate, y_offset, config) -> _Plan:
    name, sms = multiprocessors(device)
    if config is None and out == dtype and mask_mode == NO_MASK:
        config = choose(m, n, k, dtype, x_k, w_k, name, sms)
    elif config is None:
        config = fastest(walked(FEW, m), m, n, k, dtype, out, name, sms, layout_of(x_k, w_k))
    step = STEP // dtype.itemsize
    flags = (_RELU if relu else 0) | (_ACCUMULATE if accumulate else 0) | _pairs(out, n, y_offset)
    x_map = (dtype, m, k, ldx, (config.bm // config.cn, step)) if x_k else (dtype, k, m, ldx, (64, 64))
    w_map = (dtype, n, k, ldw, (config.bn // config.cm, step)) if w_k else (dtype, k, n, ldw, (64, 64))
    if isinstance(config, Single):
        flags |= 0 if accumulate or n * out.itemsize % 16 or y_offset else _gemm_single_sm90.WIDE
        launcher = prepare(
            *(device, _gemm_single_sm90.SOURCE, config.instance(dtype, out, x_k, w_k), _gemm_single_sm90.FORMATS),
            *(config.tiles(m, n) * config.cluster, 128 * config.consumers + 32, config.shared()),
        )
        return _Plan(launcher, (m, n, k), x_map, w_map, None, flags, config.walk(m, n, k), True)
    y_map = output_map(config, out, m, n, y_offset)
    flags |= _TMA_STORE if y_map else 0
    instance = config.instance(dtype, out, x_k, w_k, mask_mode)
    blocks, threads = grid(config, m, n, sms)
    launcher = prepare(device, SOURCE, instance, _FORMATS, blocks, threads, config.shared(dtype.itemsize))
    return _Plan(launcher, (m, n, k), x_map, w_map, y_map, flags, (config.group,), False)


def _pairs(out: torch.dtype, n: int, y_offset: int) -> int:
    """The flag that says that two neighbouring outputs may be stored at once."""
    return _PAIRS if n % 2 == 0 and y_offset % (2 * out.itemsize) == 0 else 0


def launch_split(x, ldx: int, w, ldw: int, bias, y, *, relu: bool = False, alpha: float = 1.0) -> torch.Tensor:
    """The same for float32 ``x (M, K)`` and ``w (N, K)``, both K-major, as three products of halves (gemm_split.cu)."""
    (m, k), n = x.shape, w.shape[0]
    sms = multiprocessors(x.device.index)[1]
    config = SPLIT[0] if SPLIT[1].tiles(m, n) > sms else SPLIT[1]
    x_parts, x_scale = _split(x, ldx)
    w_parts, w_scale = _split(w, ldw)
    maps = [
        tensor_map(parts.data_ptr(), parts.dtype, 2 * rows, k, parts.shape[2], (box, 64))
        for parts, rows, box in ((x_parts, m, config.bm // config.cn), (w_parts, n, config.bn // config.cm))
    ]
    y_map = output_map(config, y.dtype, m, n, y.data_ptr() % 16)
    maps.append(tensor_map(y.data_ptr(), *y_map) if y_map else NO_MAP)
    arguments = (
        *(*maps, _address(bias), y.data_ptr(), 0, x_scale.data_ptr(), w_scale.data_ptr()),
        *(m, n, k, alpha, (_RELU if relu else 0) | (_TMA_STORE if y_map else 0), config.group),
    )
    instance = config.instance(torch.float16, torch.float32, parts=2)
    blocks, threads = grid(config, m, n, sms)
    shared = config.shared(4)
    launch(x.device, SOURCE, instance, _FORMATS, arguments, grid=blocks, block=threads, shared=shared)
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
