"""Matrix product of float activations with int8 or int4 weights (W8A16, W4A16)."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_weight_only_sm80
from qsparse.kernels._face import C_FLOATS, check_count, check_same_device, check_tensor, face, matrix, pick_tier, rows
from qsparse.kernels._load import launch
from qsparse.kernels.gemm import gemm

_FEW_ROWS = 256  # of x; with more of them floats of the weights, made once, are the faster way
_BLOCK = 256
_COLUMNS = 16  # that a thread of gemm_weight_only_simt.cu turns into floats


def _instance(dtype: torch.dtype, packed: bool) -> str:
    return f"gemm_weight_only_simt<{C_FLOATS[dtype]}, {4 if packed else 8}>"


SOURCES = {
    "gemm_weight_only_simt.cu": tuple(_instance(dtype, packed) for dtype in C_FLOATS for packed in (False, True)),
    _gemm_weight_only_sm80.SOURCE: _gemm_weight_only_sm80.INSTANCES,
}


def pack_int4(q: torch.Tensor) -> torch.Tensor:
    """Integers (N, K) in [-8, 7] as uint8 (N, ceil(K / 2)): column 2 j in the low half of byte j, 2 j + 1 in the high.

    Each half is a four-bit two's complement; after an odd K the last high half is 0.
    """
    low, high = q[:, 0::2].to(torch.int8), torch.nn.functional.pad(q, (0, q.shape[1] % 2))[:, 1::2].to(torch.int8)
    return ((low & 15) | (high << 4)).view(torch.uint8)


def unpack_int4(w: torch.Tensor, k: int) -> torch.Tensor:
    """The integers (N, k), int8, that :func:`pack_int4` packed."""
    w = w.contiguous().view(torch.int8)
    return torch.stack((w << 4 >> 4, w >> 4), dim=2).reshape(w.shape[0], 2 * w.shape[1])[:, :k]


def spread_groups(values: torch.Tensor, group: int | None, k: int) -> torch.Tensor:
    """One value (N,) a row, or (N, ceil(k / group)) one a group, as (N, 1) or (N, k): one a column."""
    return values[:, None] if group is None else values.repeat_interleave(min(group, max(k, 1)), dim=1)[:, :k]


@face(SOURCES)
def gemm_weight_only(x, w, scale, bias=None, *, group: int | None = None, relu: bool = False, tier: str | None = None):
    """``y = act(x @ (scale * q).T + bias)`` for integer weights ``q``, multiplied as floats.

    Parameters
    ----------
    x : (M, K) float16, bfloat16 or float32
        Activations, any strides (a view whose rows are not contiguous is copied).
    w : (N, K) int8, or (N, ceil(K / 2)) uint8
        The integers ``q``, one row an output: int8, or int4 packed two to a byte as :func:`pack_int4` does.
    scale : (N,) float32; with ``group`` (N, ceil(K / group))
        One scale an output channel, or one for each ``group`` columns of it.
    bias : (N,), dtype of ``x``, optional
    group : int, optional
        Columns that share a scale; the last group may be short.
    relu : bool
        Replace negative outputs by zero; NaN stays NaN.
    tier : str, optional
        "simt" or "sm80": take no other, for tests and measurements.

    Returns
    -------
    (M, N), dtype of ``x``, row-major.

    Up to 256 rows of float16 or bfloat16 ``x`` are multiplied by the integers themselves, which are read once, and
    the sums of each group, in float32, by its scale (``sm80``). More rows, float32, and groups of no multiple of 32
    columns take ``simt``: ``scale * q`` is written out, rounded to the dtype of ``x``, and
    :func:`qsparse.kernels.gemm` does the rest. Any strides of ``w`` work; rows that start on 16 bytes are read fastest.

    A row of ``x`` that holds NaN or Inf gives NaN or Inf in its own outputs only. Raises TypeError and ValueError
    naming the argument.

    Source: integers become floats by their bits under a suitable exponent, as in Y. J. Kim et al., "Who Says Elephants
    Can't Run: Bringing Large Scale MoE Models into Cloud Scale Production" (2022).
    """
    if torch.compiler.is_compiling() and tier is None:
        return _operator(x, w, scale, bias, group, relu)
    check_tensor("x", x, tuple(C_FLOATS), (None, None))
    k = x.shape[1]
    check_tensor("w", w, (torch.int8, torch.uint8), (None, None))
    n, packed = w.shape[0], w.dtype == torch.uint8
    check_tensor("w", w, (w.dtype,), (None, -(-k // 2) if packed else k))
    if group is not None:
        group = min(check_count("group", group), 32 * (k // 32 + 1))  # wider than K is the same, and an int32 holds it
    check_tensor("scale", scale, (torch.float32,), (n,) if group is None else (n, -(-k // group)))
    if bias is not None:
        check_tensor("bias", bias, (x.dtype,), (n,))
    check_same_device(x, w=w, scale=scale, bias=bias)
    if x.device.type == "cpu":
        pick_tier(tier, (), x.device)
        return _cpu(x, w, scale, bias, group, relu)

    (x, _, ldx), (w, _, ldw) = (matrix(a, k_major=True) for a in (x, w))
    scale, bias = rows(scale), None if bias is None else rows(bias)
    possible = ["simt"]
    if gemm_weight_only.tier(x.device) != "simt" and _gemm_weight_only_sm80.supports(x, w, group):
        possible.insert(0 if x.shape[0] <= _FEW_ROWS else 1, "sm80")
    if pick_tier(tier, possible, x.device) == "simt":
        return gemm(x, _dequantized(w, ldw, scale, group, x), bias, relu=relu)
    y = torch.empty((x.shape[0], n), dtype=x.dtype, device=x.device)
    _gemm_weight_only_sm80.launch_gemm(x, ldx, w, ldw, scale, group, bias, y, relu=relu)
    return y


def _dequantized(w, ldw: int, scale, group: int | None, x) -> torch.Tensor:
    """``scale * q`` (N, K) in the dtype of ``x``, its rows on 16 bytes."""
    n, k, packed = w.shape[0], x.shape[1], w.dtype == torch.uint8
    ld = -(-k // _COLUMNS) * _COLUMNS
    out = torch.empty((n, ld), dtype=x.dtype, device=x.device)
    aligned = (w.data_ptr() | ldw) % (8 if packed else 16) == 0
    launch(
        x.device,
        "gemm_weight_only_simt.cu",
        _instance(x.dtype, packed),
        "PqiPiiPiii",
        (
            w.data_ptr(),
            ldw,
            aligned,
            scale.data_ptr(),
            1 if group is None else scale.shape[1],
            max(k, 1) if group is None else min(group, k),
            out.data_ptr(),
            ld,
            n,
            k,
        ),
        grid=-(-n * ld // (_COLUMNS * _BLOCK)),
        block=_BLOCK,
    )
    return out[:, :k]


@torch.library.custom_op("qsparse::gemm_weight_only", mutates_args=())
def _operator(
    x: torch.Tensor,
    w: torch.Tensor,
    scale: torch.Tensor,
    bias: torch.Tensor | None,
    group: int | None,
    relu: bool,
) -> torch.Tensor:
    """What ``torch.compile`` sees in place of the face, which it could not trace into."""
    return gemm_weight_only(x, w, scale, bias, group=group, relu=relu)


@_operator.register_fake
def _(x, w, scale, bias, group, relu):
    return x.new_empty((x.shape[0], w.shape[0]))


# --- tier cpu -------------------------------------------------------------------------------------------------------

_CHUNK = 2**18  # weights that become float32 at a time: 1 MB, which stays in the cache


def _has_packed_product(x: torch.Tensor, w: torch.Tensor, group: int | None) -> bool:
    """Whether PyTorch's own product is vectorised for this case: bfloat16 by int8 with one scale a channel.

    It works by 16 columns and reads beyond the end of what is no multiple of them.
    """
    return (
        (x.dtype, w.dtype, group) == (torch.bfloat16, torch.int8, None)
        and 0 not in (x.shape[0], *w.shape)
        and w.shape[1] % 16 == 0
        and torch.backends.cpu.get_cpu_capability() in ("AVX2", "AVX512")
    )


@torch.no_grad()
def _cpu(x, w, scale, bias, group, relu):
    k = x.shape[1]
    if _has_packed_product(x, w, group):
        # Scaled afterwards in float32: the operator would want the scales themselves in bfloat16
        y = torch._weight_int8pack_mm(rows(x), rows(w), torch.ones(len(w), dtype=x.dtype)).float().mul_(scale)
        y = y if bias is None else y.add_(bias)
    else:
        y, x32 = torch.empty((x.shape[0], w.shape[0]), dtype=torch.float32), x.float()
        bias = None if bias is None else bias.float()
        height = max(16, _CHUNK // max(k, 1))
        for start in range(0, len(w), height):
            part = slice(start, start + height)
            q = w[part] if w.dtype == torch.int8 else unpack_int4(w[part], k)
            weights = q.float().mul_(spread_groups(scale[part], group, k))
            y[:, part] = torch.nn.functional.linear(x32, weights, None if bias is None else bias[part])
    return (y.relu_() if relu else y).to(x.dtype)
