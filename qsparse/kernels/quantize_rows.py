"""8-bit quantization of each row of a matrix."""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS, check_same_device, check_tensor, cpu_slices, face, matrix, rows
from qsparse.kernels._load import launch, multiprocessors

SOURCE = "quantize_rows.cu"
_SMALLEST_NORMAL = torch.finfo(torch.float32).tiny
_LEAST_BLOCK = 128
_ASYMMETRIC, _RELU = 1, 2  # enum Mode of the kernel
_SUMS_K = (2**31 - 1) // 255  # the longest row of q whose sum cannot leave int32


@dataclass(frozen=True)
class Config:
    """How ``quantize_rows.cu`` holds a row: ``items`` in each of ``threads`` threads, of 16 bytes or of one element."""

    threads: int
    items: int
    vector: bool = True

    def __post_init__(self):
        if self.threads not in (2, 4, 8, 16, 32, *range(_LEAST_BLOCK, 1025, 32)):
            raise ValueError(f"a row is part of a warp's, a warp's, or a block's of 128 to 1,024 threads: {self}")

    def instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel."""
        elements = 16 // dtype.itemsize if self.vector else 1
        return f"quantize_rows<{C_FLOATS[dtype]}, {elements}, {self.threads}, {self.items}>"

    @property
    def rows(self) -> int:
        """Rows a block."""
        return max(1, _LEAST_BLOCK // self.threads)


CONFIGS = (
    Config(8, 4),
    Config(16, 8),
    Config(32, 8),
    Config(128, 4),
    Config(128, 8),
    Config(256, 8),
    Config(512, 8),
)
UNALIGNED = Config(128, 8, vector=False)
SOURCES = {SOURCE: tuple(config.instance(dtype) for config in (*CONFIGS, UNALIGNED) for dtype in C_FLOATS)}


@functools.lru_cache(maxsize=4096)
def choose(m: int, row_bytes: int, sms: int) -> Config:
    """The smallest configuration that holds a row; of few rows, one that leaves each thread 32 bytes of it."""
    vectors = -(-row_bytes // 16)
    most = 2 if m <= 2 * sms else 8
    fitting = (c for c in CONFIGS if c.threads * min(c.items, most) >= vectors)
    return next(fitting, CONFIGS[-1])


@face(SOURCES)
def quantize_rows(x, scale=None, *, symmetric: bool = True, relu: bool = False, return_sums: bool = False):
    """``q = rint(x / scale) + zero_point`` of each row, so that ``x ~ scale[:, None] * (q - zero_point[:, None])``.

    Parameters
    ----------
    x : (M, K) float32, float16 or bfloat16, any strides
    scale : (1,) float32, optional
        One scale for all, found before (static activations): what lies beyond its range is clipped, and the zero
        point is 0. Left out, each row has its own (dynamic).
    symmetric : bool
        True: int8 in [-127, 127], ``scale = absmax / 127``, no zero point. False: uint8 in [0, 255], with a range from
        the row's minimum to its maximum that always includes 0: ``scale = max / 255 - min / 255``, ``zero_point =
        rint(-min / scale)``. With a given ``scale`` that is a range from 0 up, for what comes from a ReLU.
    relu : bool
        Quantize ``max(x, 0)`` (NaN stays NaN).
    return_sums : bool
        Add the sums of each row of ``q``.

    Returns
    -------
    q : (M, K) int8, or uint8 where not symmetric; row-major; ties round to even
    scale : (M,) float32; a given one again and again
    zero_point : (M,) int32, where not symmetric
    sums : (M,) int32, with ``return_sums``

    The division is a true one in float32, and CPU and GPU give the same bits. Where a row's scale would be below the
    smallest normal float32 it is 1, and the zero point 0 (a row of zeros). A row that holds NaN or Inf gets a NaN
    scale and zeros, with a given ``scale`` too, so that its outputs are NaN and no other row's.

    Raises TypeError for another dtype; ValueError unless ``x`` is 2-D, or for sums that int32 might not hold.

    Applied to weights ``(N, K)`` this is per-output-channel quantization.

    Source: B. Jacob et al., "Quantization and Training of Neural Networks for Efficient Integer-Arithmetic-Only
    Inference" (CVPR 2018).
    """
    if torch.compiler.is_compiling():
        return tuple(_operator(x, scale, symmetric, relu, return_sums))
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    m, k = x.shape
    if scale is not None:
        check_tensor("scale", scale, (torch.float32,), (1,))
        check_same_device(x, scale=scale)
    if return_sums and k > _SUMS_K:
        raise ValueError(f"return_sums is possible up to K = {_SUMS_K} (K is {k}): sums must fit int32")
    q = torch.empty((m, k), dtype=torch.int8 if symmetric else torch.uint8, device=x.device)
    scales = torch.empty(m, dtype=torch.float32, device=x.device)
    zeros = None if symmetric else torch.empty(m, dtype=torch.int32, device=x.device)
    sums = torch.empty(m, dtype=torch.int32, device=x.device) if return_sums else None
    outputs = q, scales, zeros, sums
    if x.device.type == "cpu":
        _cpu(rows(x), scale, relu, *outputs)
    else:
        _launch(x, scale, relu, *outputs)
    return tuple(output for output in outputs if output is not None)


@torch.library.custom_op("qsparse::quantize_rows", mutates_args=())
def _operator(
    x: torch.Tensor, scale: torch.Tensor | None, symmetric: bool, relu: bool, return_sums: bool
) -> list[torch.Tensor]:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return list(quantize_rows(x, scale, symmetric=symmetric, relu=relu, return_sums=return_sums))


@_operator.register_fake
def _(x, scale, symmetric, relu, return_sums):
    per_row = (torch.float32, *(() if symmetric else (torch.int32,)), *((torch.int32,) if return_sums else ()))
    q = x.new_empty(x.shape, dtype=torch.int8 if symmetric else torch.uint8)
    return [q, *(x.new_empty(x.shape[0], dtype=dtype) for dtype in per_row)]


def quantize_for(x, scale, told):
    """What ``quantize_rows(x, scale)`` gives, with ``told`` (1,), the scale of a later layer, for each row.

    A row that holds NaN or Inf is NaN there, so that a network of static layers loses it in the end.
    """
    if x.device.type == "cpu":
        q, scales = quantize_rows(x, scale)
        return q, torch.add(told, scales, alpha=0)
    q = torch.empty(x.shape, dtype=torch.int8, device=x.device)
    scales = torch.empty(x.shape[0], dtype=torch.float32, device=x.device)
    _launch(x, scale, False, q, scales, None, None, told)
    return q, scales


def _launch(x, scale, relu: bool, q, scales, zeros, sums, told=None) -> None:
    x, _, ld = matrix(x, k_major=True)
    m, k = x.shape
    row_bytes = k * x.element_size()
    aligned = (row_bytes | ld * x.element_size() | x.data_ptr()) % 16 == 0
    config = choose(m, row_bytes, multiprocessors(x.device.index)[1]) if aligned else UNALIGNED
    launch(
        x.device,
        SOURCE,
        config.instance(x.dtype),
        "PqPPPPPPqqi",
        (
            x.data_ptr(),
            ld,
            *(0 if a is None else a.data_ptr() for a in (scale, told, q, scales, zeros, sums)),
            m,
            k,
            (0 if zeros is None else _ASYMMETRIC) | (_RELU if relu else 0),
        ),
        grid=-(-m // config.rows),
        block=max(config.threads, _LEAST_BLOCK),
    )


@torch.no_grad()
def _cpu(x, scale, relu: bool, q, scales, zeros, sums) -> None:
    for part in cpu_slices(x.shape[0]):
        zero = None if zeros is None else zeros[part]
        _cpu_slice(x[part].float(), scale, relu, q[part], scales[part], zero)
    if sums is not None:
        torch.sum(q, dim=1, dtype=torch.int32, out=sums)


def _cpu_slice(x, given, relu: bool, q, scales, zero) -> None:
    if relu:
        x = x.relu()
    low, high = (x.amin(1), x.amax(1)) if x.shape[1] else (x.new_zeros(x.shape[0]) for _ in range(2))
    low, high = low.clamp_(max=0), high.clamp_(min=0)
    if zero is None:
        torch.div(torch.maximum(-low, high), 127, out=scales)
    else:
        torch.sub(high / 255, low / 255, out=scales)
    finite = scales.isfinite()  # as the row is
    if given is None:
        scales[scales < _SMALLEST_NORMAL] = 1
    else:
        scales.copy_(given.expand_as(scales))
    values = (x / scales[:, None]).round_()  # ties to even
    if zero is None:
        values.clamp_(-127, 127)
    else:
        shift = (-low / scales).round_().nan_to_num_(0).clamp_(max=255) if given is None else torch.zeros_like(scales)
        zero.copy_(shift)
        values.add_(shift[:, None]).clamp_(0, 255)
    if given is not None:
        values.nan_to_num_(0)
    q.copy_(values)
    if not finite.all():
        for part in (q, zero):
            if part is not None:
                part[~finite] = 0
        scales[~finite] = torch.nan
