"""What PyTorch offers for a linear layer: cuBLAS and cuBLASLt, told apart, and its fused and unfused epilogues."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator

import torch
from torch import Tensor

from qsparse.bench.harness import Call

_PLAIN, _TF32 = ("highest", ""), ("high", "_tf32")  # what PyTorch calls the precision, and what a peer's name gains


@contextlib.contextmanager
def blas(library: str = "default", precision: str = "highest") -> Iterator[None]:
    """Let PyTorch multiply through `library` ("cublas", "cublaslt", "default"), in float32 with that `precision`.

    `precision` is that of `torch.set_float32_matmul_precision`: "highest" is SGEMM, "high" is tf32.
    """
    before = torch.backends.cuda.preferred_blas_library(), torch.get_float32_matmul_precision()
    torch.backends.cuda.preferred_blas_library(library)
    torch.set_float32_matmul_precision(precision)
    try:
        yield
    finally:
        torch.backends.cuda.preferred_blas_library(before[0])
        torch.set_float32_matmul_precision(before[1])


def products(a: Tensor, b: Tensor, precision: str | None = None) -> dict[str, Call]:
    """`a @ b.T` on a GPU. For float32 a `precision` of "high" allows tf32 (and names it), any other is SGEMM."""
    allowed, suffix = _TF32 if precision == "high" else _PLAIN
    return {
        library + suffix: Call(functools.partial(torch.mm, a, b.t()), functools.partial(blas, library, allowed))
        for library in ("cublas", "cublaslt")
    }


def bias_relu_products(a: Tensor, b: Tensor, bias: Tensor, precision: str | None = None) -> dict[str, Call]:
    """`relu(a @ b.T + bias)` on a GPU: as one writes it, and by the one fused call that there is (a private one)."""
    allowed, suffix = _TF32 if precision == "high" else _PLAIN
    setting = functools.partial(blas, "default", allowed)
    fused = functools.partial(torch._addmm_activation, bias, a, b.t(), use_gelu=False)
    return {
        "torch_eager" + suffix: Call(lambda: torch.nn.functional.linear(a, b, bias).relu(), setting),
        "torch._addmm_activation" + suffix: Call(fused, setting),
    }


def cpu_products(a: Tensor, b: Tensor) -> dict[str, Call]:
    """`a @ b.T` in float32 on the CPU: what every other dtype has to beat there."""
    return {"torch_fp32": Call(functools.partial(torch.mm, a, b.t()))}


def cpu_bias_relu_products(a: Tensor, b: Tensor, bias: Tensor) -> dict[str, Call]:
    """`relu(a @ b.T + bias)` in float32 on the CPU."""
    return {"torch_fp32": Call(lambda: torch.nn.functional.linear(a, b, bias).relu())}


def int8_products(qx: Tensor, qw: Tensor) -> dict[str, Call]:
    """The bare int32 product of int8 `qx` (M, K) and `qw` (N, K): on a GPU, M must exceed 16 and K, N divide by 8."""
    return {"torch._int_mm": Call(functools.partial(torch._int_mm, qx, qw.t()))}


def int8_pipelines(
    qx: Tensor, qw: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor, compile: str = "off"
) -> dict[str, Call]:
    """What a user writes around `torch._int_mm`, relu(acc * scale_x * scale_w + bias) in float16, eager and compiled.

    `compile` is the mode of `torch.compile`, or "off".
    """
    operands = qx, qw, scale_x, scale_w, bias
    found = {"torch_int8_eager": Call(functools.partial(_int8_pipeline, *operands))}
    if compile != "off":
        found["torch_int8_compiled"] = Call(functools.partial(compiled(_int8_pipeline, compile), *operands))
    return found


def _int8_pipeline(qx: Tensor, qw: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor) -> Tensor:
    return (torch._int_mm(qx, qw.t()) * scale_x[:, None] * scale_w + bias).relu().half()


def compiled(function, mode: str):
    """`torch.compile` for one shape; whoever compiles for many calls `torch.compiler.reset` between."""
    return torch.compile(function, mode=mode, dynamic=False)


def float8(x: Tensor) -> tuple[Tensor, Tensor]:
    """x (M, K) as float8_e4m3fn with a scale a row, absmax / 448."""
    x = x.float()
    scale = (x.abs().amax(1) / 448).clamp(min=torch.finfo(torch.float32).tiny)
    return (x / scale[:, None]).clamp(-448, 448).to(torch.float8_e4m3fn), scale


def scaled_products(x: Tensor, w: Tensor, scale_x: Tensor, scale_w: Tensor) -> dict[str, Call]:
    """The product of float8 `x` (M, K) and `w` (N, K) with a scale a row and a channel, in bfloat16; the fast sums."""
    scales = {"scale_a": scale_x[:, None], "scale_b": scale_w[None, :]}
    function = functools.partial(torch._scaled_mm, x, w.t(), **scales, out_dtype=torch.bfloat16, use_fast_accum=True)
    return {"torch._scaled_mm": Call(function)}
