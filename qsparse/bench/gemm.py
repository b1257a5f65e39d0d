"""The dense product, plain and with bias and ReLU: `kernels.gemm` (and on a CPU `gemm_int8`) against the libraries.

A shape is that of the layer, M, N, K = batch rows, outputs, inputs, and a layout is one of the three products that
training takes from it: `nt` the forward pass x · wᵀ, `nn` the input gradient dy · w, `tn` the weight gradient dyᵀ · x.
All three are 2·M·N·K operations.
"""

from __future__ import annotations

import functools
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.bench.harness import (
    REPETITIONS,
    TOLERANCES,
    Call,
    Contender,
    Measurement,
    Reference,
    append,
    compete,
    copy_gbps,
    product_reference,
    row,
)
from qsparse.bench.peers import pytorch
from qsparse.bench.shapes import CPU_SHAPES, DUEL, GPU_SHAPES, LARGEST, Shape
from qsparse.bench.summary import NO_CEILING, Ceilings, Result, means
from qsparse.errors import UserError
from qsparse.measure import environment

DTYPES = ("float16", "bfloat16", "float32", "int8")
GPU_DTYPES, CPU_DTYPES = ("float16", "bfloat16", "float32"), ("float32", "bfloat16", "int8")
LAYOUTS = ("nt", "nn", "tn")
EPILOGUES = ("none", "bias_relu")
TIER_DTYPES = {"simt": GPU_DTYPES, "sm80": ("float16", "bfloat16"), "sm90": GPU_DTYPES}
"""What our tiers multiply."""


@dataclass(frozen=True)
class Problem:
    """One product out (R, C) = a (R, S) @ b (C, S).T with seeded normal values, and the layer that it belongs to."""

    shape: Shape
    dtype: str
    layout: str
    a: Tensor
    b: Tensor
    bias: Tensor

    @property
    def flop(self) -> int:
        m, n, k = self.shape
        return 2 * m * n * k

    def nbytes(self, epilogue: str) -> int:
        """What has to be read and written at least (int8 writes float32)."""
        rows, columns = self.a.shape[0], self.b.shape[0]
        out = rows * columns * (4 if self.dtype == "int8" else self.a.element_size())
        size = 1 if self.dtype == "int8" else self.a.element_size()
        bias = self.bias.numel() * self.bias.element_size() if epilogue == "bias_relu" else 0
        return (self.a.numel() + self.b.numel()) * size + out + bias


def problem(shape: Shape, dtype: str, layout: str, device: torch.device) -> Problem:
    """Operands of `dtype` (float32 ones to quantize for int8) on `device`, the same in every run."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    stored = torch.float32 if dtype == "int8" else getattr(torch, dtype)

    def normal(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(stored)

    if layout == "nt":
        a, b = normal(m, k), normal(n, k)
    elif layout == "nn":
        a, b = normal(m, n), normal(n, k).t()
    else:
        a, b = normal(m, n).t(), normal(m, k).t()
    return Problem(shape, dtype, layout, a, b, normal(b.shape[0]))


@dataclass(frozen=True)
class Variant:
    """One of our ways to compute a problem. `precision` is null but for float32."""

    epilogue: str
    precision: str | None

    @property
    def name(self) -> str:
        return f"qsparse {self.precision or ''} {self.epilogue}"


def precisions(dtype: str, device: torch.device, tier: str | None = None) -> tuple[str | None, ...]:
    """The float32 precisions that differ on the device (in the tier), the plain one first; (None,) for other dtypes."""
    if dtype != "float32":
        return (None,)
    if device.type == "cpu" or tier in ("simt", "sm80"):
        return ("ieee",)
    return ("highest", "high") if tier == "sm90" else ("ieee", "highest", "high")


def _tolerance(dtype: str, precision: str | None):
    return TOLERANCES["tf32" if precision == "high" else dtype]


def _kernel(given: Problem, variant: Variant, tier: str | None = None) -> Call:
    """The call of our face for a variant of the problem, in a tier of its own choice (None) or in the one named."""
    fused = variant.epilogue == "bias_relu"
    bias = given.bias if fused else None
    if given.dtype == "int8":
        (qa, scale_a), (qb, scale_b) = kernels.quantize_rows(given.a), kernels.quantize_rows(given.b)
        return Call(functools.partial(kernels.gemm_int8, qa, qb, scale_a, scale_b, bias, relu=fused))
    options = {"relu": fused} | ({} if tier is None else {"tier": tier})
    if variant.precision is not None:
        options["precision"] = variant.precision
    return Call(functools.partial(kernels.gemm, given.a, given.b, bias, **options))


def _reference(given: Problem, variant: Variant) -> Reference:
    fused = variant.epilogue == "bias_relu"
    a, b = given.a, given.b
    if given.dtype == "int8":  # the reference of what the kernel is asked for: the product of the quantized values
        a, b = (q.to(torch.float64) * scale[:, None] for q, scale in map(kernels.quantize_rows, (a, b)))
    return product_reference(a, b, given.bias if fused else None, relu=fused)


def _peers(given: Problem, variant: Variant, reference: Reference) -> dict[str, Contender]:
    operands = [given.a, given.b] + ([given.bias] if variant.epilogue == "bias_relu" else [])
    if given.a.device.type == "cpu":
        operands = [operand.float() for operand in operands]
        calls = (pytorch.cpu_bias_relu_products if len(operands) == 3 else pytorch.cpu_products)(*operands)
        tolerance = TOLERANCES["float32"]
        if given.dtype == "int8":  # float32 multiplies the values themselves, not the quantized ones
            reference = product_reference(*operands, relu=len(operands) == 3)
    else:
        choose = pytorch.bias_relu_products if len(operands) == 3 else pytorch.products
        calls, tolerance = choose(*operands, precision=variant.precision), _tolerance(given.dtype, variant.precision)
    return {name: Contender(call, reference, tolerance) for name, call in calls.items()}


def measure_problem(
    given: Problem,
    variants: Iterable[Variant],
    environment: dict,
    repetitions: int = REPETITIONS,
    tier: str | None = None,
) -> list[dict]:
    """Check and time the variants and their peers in one interleaved run; a row for each variant and peer."""
    ours, theirs, pairs = {}, {}, []
    references: dict[str, Reference] = {}
    for variant in variants:
        if variant.epilogue not in references:
            references[variant.epilogue] = _reference(given, variant)
        reference = references[variant.epilogue]
        tolerance = _tolerance(given.dtype, variant.precision)
        ours[variant.name] = Contender(_kernel(given, variant, tier), reference, tolerance)
        for peer, contender in _peers(given, variant, reference).items():
            key = f"{peer} {variant.epilogue}"
            theirs.setdefault(key, contender)  # float32's SGEMM stands beside more than one variant
            pairs.append((variant, peer, key))
    measured, telemetry = compete(ours, theirs, given.a.device, repetitions)
    return [
        row(
            op="gemm_int8" if given.dtype == "int8" else "gemm",
            dtype=given.dtype,
            shape=given.shape,
            kernel=measured[variant.name],
            peer=peer,
            against=measured[key],
            flop=given.flop,
            nbytes=given.nbytes(variant.epilogue),
            environment=environment,
            layout=given.layout,
            epilogue=variant.epilogue,
            precision=variant.precision,
            **telemetry,
        )
        for variant, peer, key in pairs
    ]


def bench(
    device: torch.device,
    *,
    dtypes: Iterable[str] = (),
    shapes: Iterable[Shape] = (),
    layouts: Iterable[str] = ("nt",),
    tier: str | None = None,
    duel: bool | None = None,
    repetitions: int = REPETITIONS,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure every dtype, layout and shape on `device` (nothing given: those that make sense there, or in `tier`).

    `tier` takes that tier of ours instead of the best one. `duel` adds the product of 4096³ in float32 on the CPU
    against the GPU (None: where there is a GPU and float32 is measured, in no tier of its own). Rows are appended to
    `out` as they come, `say` hears what is being measured.

    Raises UserError for what this device does not do, before anything runs.
    """
    on_gpu = device.type == "cuda"
    dtypes = tuple(dtypes) or (TIER_DTYPES.get(tier, GPU_DTYPES) if on_gpu else CPU_DTYPES)
    shapes, layouts = tuple(shapes) or (GPU_SHAPES if on_gpu else CPU_SHAPES), tuple(layouts)
    if on_gpu and "int8" in dtypes:
        raise UserError("--dtype int8 is compared on the CPU only; on a GPU that is `qsparse bench int8`")
    if tier and not on_gpu:
        raise UserError(f"--tier {tier} is of the GPU's kernels, and this runs on the CPU: leave it out")
    if duel and not on_gpu:
        raise UserError("--duel sets the CPU against a GPU, and this runs on the CPU: leave it out")
    if set(layouts) != {"nt"} and "int8" in dtypes:
        raise UserError("--dtype int8 has the forward product only: leave --layout out, or name --dtype float32")
    where = environment(device)
    rows: list[dict] = []
    if out:
        append(out, ())  # refused now, and not after the first measurement

    def keep(more: Iterable[dict]) -> None:
        more = list(more)
        rows.extend(more)
        if out:
            append(out, more)

    ceilings = Ceilings(copy_gbps(device)) if on_gpu else None
    for dtype in dtypes:
        for layout, shape in _order(layouts, shapes):
            say(f"{dtype} {layout} {','.join(map(str, shape))}")
            if ceilings and not ceilings.know(dtype) and (layout, shape) != ("nt", LARGEST):
                ceilings.learn(_measure(LARGEST, dtype, "nt", device, where, 20, epilogues=("none",)))
            measured = _measure(shape, dtype, layout, device, where, repetitions, tier)
            if ceilings:
                ceilings.learn(measured)
            keep(each | (ceilings.share(each) if ceilings else NO_CEILING) for each in measured)
    if duel or (duel is None and on_gpu and tier is None and "float32" in dtypes):
        say("float32 duel of CPU and GPU")
        keep(each | ceilings.share(each) for each in run_duel(device, where))
    ceiling = None
    if ceilings:
        best = ", ".join(f"{' '.join(filter(None, key))} {value:.3g}" for key, value in ceilings.tflops.items())
        ceiling = (
            f"of the ceiling: the least time that the work and the bytes allow, over the time taken, at the best "
            f"TFLOP/s of ours and cuBLAS at 8192³ in this run ({best}) and a copy's {ceilings.gbps:.0f} GB/s"
        )
    return Result(rows, means(rows), ceiling)


def _order(layouts: Iterable[str], shapes: Iterable[Shape]) -> Iterator[tuple[str, Shape]]:
    """The forward product of the largest shape first: it gives the ceiling."""
    pairs = [(layout, shape) for layout in layouts for shape in shapes]
    yield from sorted(pairs, key=lambda pair: pair != ("nt", LARGEST))


def _measure(shape, dtype, layout, device, environment, repetitions, tier=None, epilogues=EPILOGUES) -> list[dict]:
    variants = [
        Variant(epilogue, precision)
        for precision in precisions(dtype, device, tier)
        for epilogue in epilogues
        if epilogue == "none" or layout == "nt"
    ]
    given = problem(shape, dtype, layout, device)
    try:
        return measure_problem(given, variants, environment, repetitions, tier)
    except ValueError as error:
        if tier is None:
            raise
        raise UserError(f"--tier {tier} with {dtype} {layout} {','.join(map(str, shape))}: {error}") from error


def run_duel(device: torch.device, environment: dict, shape: Shape = DUEL) -> list[dict]:
    """The same face, float32, on the CPU (one run, wall-clock) and on the GPU."""
    given = problem(shape, "float32", "nt", device)
    variants = [Variant("none", precision) for precision in precisions("float32", device)]
    reference = _reference(given, variants[0])
    contenders = {
        variant.name: Contender(_kernel(given, variant), reference, _tolerance("float32", variant.precision))
        for variant in variants
    }
    measured, telemetry = compete(contenders, {}, device)
    a, b = given.a.cpu(), given.b.cpu()
    kernels.gemm(a[:512], b[:512])  # wakes the threads
    started = time.perf_counter()
    output = kernels.gemm(a, b)
    us = round((time.perf_counter() - started) * 1e6, 3)
    error = reference.error(output.to(device))
    correct = error.within(TOLERANCES["float32"])
    cpu = Measurement(error, correct, us if correct else None, repetitions=1)
    return [
        row(
            op="gemm",
            dtype="float32",
            shape=shape,
            kernel=measured[variant.name],
            peer="cpu",
            against=cpu,
            flop=given.flop,
            nbytes=given.nbytes("none"),
            environment=environment,
            layout="nt",
            epilogue="none",
            precision=variant.precision,
            **telemetry,
        )
        for variant in variants
    ]
