"""What int8 costs and gains: the products with their scaling, the quantization before them, and what libraries offer.

A shape is that of the layer, M, N, K = batch rows, outputs, inputs. Activations come as float16 or quantized already
(field `activations`: "dynamic" where our time holds their quantization, null where they are int8); weights are always
quantized before. A peer does the same work for its user: its row says which of ours it stands beside.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from qsparse import kernels, nn
from qsparse.bench.harness import (
    EXACT,
    REPETITIONS,
    TOLERANCES,
    Call,
    Contender,
    Reference,
    Tolerance,
    append,
    compete,
    copy_gbps,
    product_reference,
    read_gbps,
    row,
    willing,
)
from qsparse.bench.peers import pytorch, torchao
from qsparse.bench.shapes import (
    CPU_QUANTIZED,
    CPU_SHAPES,
    CPU_WEIGHT_ONLY,
    DUEL,
    GPU_QUANTIZED,
    GPU_SHAPES,
    GPU_WEIGHT_ONLY,
    LARGEST,
    Shape,
)
from qsparse.bench.summary import NO_CEILING, Ceilings, Result, means
from qsparse.errors import UserError
from qsparse.kernels.gemm_weight_only import spread_groups, unpack_int4
from qsparse.measure import environment

OPS = ("gemm_int8", "gemm_weight_only", "quantize_rows", "gemm_fp8")
COMPILE = ("off", "default", "max-autotune-no-cudagraphs")
QUANTIZED = ("float16", "bfloat16", "float32")
_FUSED = {"epilogue": "bias_relu", "out_dtype": "float16"}
_SGEMM = TOLERANCES["float32"]
_LIBRARY = Tolerance(3e-2, 6e-2)  # a library's int8 rounds in its own way: 1.3 % of normal data, as ours does


@dataclass(frozen=True)
class Case:
    """One of our calls, and those of the libraries that a user would make for the same: a row each."""

    op: str
    dtype: str
    call: Callable[[], Tensor]
    reference: Reference
    flop: int
    nbytes: int
    peers: dict[str, Contender] = field(default_factory=dict)
    fields: dict = field(default_factory=dict)
    tolerance: Tolerance = EXACT

    @property
    def name(self) -> str:
        return " ".join(("qsparse", self.op, self.dtype, *(str(value) for value in self.fields.values())))


@dataclass(frozen=True)
class Layer:
    """A linear layer with a batch before it: seeded normal values, and what quantization makes of them.

    x (M, K), w (N, K), bias (N,) float16; qx, qw int8 with scales (M,), (N,) float32; acc (M, N) float64 holds the
    exact integers of the product.
    """

    shape: Shape
    x: Tensor
    w: Tensor
    bias: Tensor
    qx: Tensor
    scale_x: Tensor
    qw: Tensor
    scale_w: Tensor
    acc: Tensor

    @property
    def flop(self) -> int:
        m, n, k = self.shape
        return 2 * m * n * k

    def scaled(self) -> Reference:
        """relu(((float32) acc * scale_x) * scale_w + bias) in float16: what every bit has to be."""
        y = scaled(self.acc, self.scale_x, self.scale_w, self.bias.float(), relu=True)
        return Reference(y.half().to(torch.float64))


def layer(shape: Shape, device: torch.device) -> Layer:
    """The layer of a shape on `device`, the same in every run; PyTorch's arithmetic quantizes it, not our kernel."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    x, w, bias = (torch.randn(size, generator=generator, device=device).half() for size in ((m, k), (n, k), (n,)))
    (qx, scale_x), (qw, scale_w) = quantized(x), quantized(w)
    acc = qx.to(torch.float64) @ qw.to(torch.float64).t()
    return Layer(shape, x, w, bias, qx, scale_x, qw, scale_w, acc)


def quantized(x: Tensor) -> tuple[Tensor, Tensor]:
    """rint(x / scale) as int8 with scale = absmax / 127 a row, in float32: what `quantize_rows` has to give."""
    x = x.float()
    absmax = x.abs().amax(1)
    scale = absmax / torch.full_like(absmax, 127)  # by a number, a GPU would multiply with its reciprocal
    scale = torch.where(scale < torch.finfo(torch.float32).tiny, 1.0, scale)
    return (x / scale[:, None]).round().to(torch.int8), scale


def scaled(acc: Tensor, scale_x: Tensor, scale_w: Tensor, bias: Tensor, *, relu: bool) -> Tensor:
    """((float32) acc * scale_x) * scale_w + bias, each step rounded to float32; `acc` (M, N) float64 holds integers."""
    y = acc.float().mul_(scale_x[:, None]).mul_(scale_w).add_(bias)
    return y.relu_() if relu else y


def int8_cases(given: Layer, compile: str, say: Callable[[str], None]) -> list[Case]:
    """The bare integers, the product with its epilogue, and both behind the quantization of float16 activations."""
    m, n, k = given.shape
    on_gpu = given.x.is_cuda
    operands = given.qx, given.qw, given.scale_x, given.scale_w, given.bias.float()
    fused = functools.partial(kernels.gemm_int8, relu=True, out_dtype=torch.float16)
    integers, scaled = Reference(given.acc), given.scaled()
    float16 = TOLERANCES["float16"]

    bare = willing(pytorch.int8_products(given.qx, given.qw), integers, EXACT, say)
    pipelines = willing(pytorch.int8_pipelines(*operands, compile), scaled, float16, say)
    eights = {}
    if on_gpu:
        eights = _float8_peers(given, say)
    if given.shape == DUEL and on_gpu:
        x, w = given.x.float(), given.w.float()
        eights |= willing({"cublas_fp32": pytorch.products(x, w)["cublas"]}, product_reference(x, w), _SGEMM, say)
    dense = _dense_peers(given, compile, say)

    layer = given.qw, given.scale_w, operands[-1]
    dynamic = functools.partial(kernels.linear_int8, given.x, *layer, relu=True, out_dtype=torch.float16)

    side = n * k + 4 * n + 4 * n  # weights, their scales, the bias
    case = functools.partial(Case, "gemm_int8", "int8", flop=given.flop)
    return [
        case(
            functools.partial(kernels.gemm_int8, given.qx, given.qw, out_dtype=torch.int32),
            integers,
            nbytes=m * k + n * k + 4 * m * n,
            peers=bare,
            fields={"activations": None, "epilogue": "none", "out_dtype": "int32"},
        ),
        case(
            functools.partial(fused, *operands),
            scaled,
            nbytes=m * k + 4 * m + side + 2 * m * n,
            peers=bare | pipelines | eights,
            fields={"activations": None, **_FUSED},
        ),
        case(
            dynamic,
            scaled,
            nbytes=2 * m * k + side + 2 * m * n,
            peers=dense,
            fields={"activations": "dynamic", **_FUSED},
        ),
    ]


def _float8_peers(given: Layer, say: Callable[[str], None]) -> dict[str, Contender]:
    """`torch._scaled_mm` with a scale a row and a channel; it adds no bias and writes bfloat16."""
    (x8, scale_x), (w8, scale_w) = pytorch.float8(given.x), pytorch.float8(given.w)
    reference = product_reference(x8.to(torch.float64) * scale_x[:, None], w8.to(torch.float64) * scale_w[:, None])
    return willing(pytorch.scaled_products(x8, w8, scale_x, scale_w), reference, TOLERANCES["float8"], say)


def float8_cases(given: Layer, say: Callable[[str], None]) -> list[Case]:
    """The float8 product with its epilogue, beside PyTorch's, which does less (on a CPU, beside float32)."""
    m, n, k = given.shape
    (x8, scale_x), (w8, scale_w) = pytorch.float8(given.x), pytorch.float8(given.w)
    bias = given.bias.float()
    reals = (x8.to(torch.float32) * scale_x[:, None], w8.to(torch.float32) * scale_w[:, None])
    return [
        Case(
            "gemm_fp8",
            "float8_e4m3fn",
            functools.partial(kernels.gemm_fp8, x8, w8, scale_x, scale_w, bias, relu=True, out_dtype=torch.float16),
            product_reference(*reals, bias, relu=True),
            flop=given.flop,
            nbytes=m * k + n * k + 4 * (m + 2 * n) + 2 * m * n,
            peers=_float8_peers(given, say) if given.x.is_cuda else _dense_peers(given, "off", say),
            fields={"activations": None, **_FUSED},
            tolerance=TOLERANCES["float8"],
        )
    ]


def weight_only_cases(shape: Shape, device: torch.device, compile: str, say: Callable[[str], None]) -> list[Case]:
    """float16 activations by int8 weights with a scale a channel, and by int4 weights with one for every 128 inputs."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    x, w = (torch.randn(size, generator=generator, device=device).half() for size in ((m, k), (n, k)))
    bias = torch.zeros(n, device=device, dtype=torch.float16)
    if device.type == "cuda":
        calls, tolerance = pytorch.products(x, w), TOLERANCES["float16"]
        peers = willing(calls, product_reference(x, w), tolerance, say)
        layers = torchao.int8_layers(x, w, bias, compile, "torchao_int8wo")
        peers |= willing(layers, product_reference(x, w, relu=True), _LIBRARY, say)
    else:
        peers = willing(pytorch.cpu_products(x.float(), w.float()), product_reference(x, w), _SGEMM, say)
    cases = []
    for bits, group in ((8, None), (4, 128)):
        linear = nn.Linear(k, n, bias=False, device=device)
        linear.weight.data.copy_(w)
        stored = nn.WeightOnlyLinear.from_linear(linear, bits, group)
        q = stored.weight if bits == 8 else unpack_int4(stored.weight, k)
        reals = q.to(torch.float64) * spread_groups(stored.weight_scale, group, k)
        cases.append(
            Case(
                "gemm_weight_only",
                f"int{bits}wo",
                functools.partial(kernels.gemm_weight_only, x, stored.weight, stored.weight_scale, group=group),
                product_reference(x, reals),
                flop=2 * m * n * k,
                nbytes=stored.weight.nbytes + stored.weight_scale.nbytes + 2 * m * k + 2 * m * n,
                peers=peers,
                fields={"activations": "float16", "epilogue": "none", "out_dtype": "float16", "group": group},
                tolerance=TOLERANCES["float16"],
            )
        )
    return cases


def _dense_peers(given: Layer, compile: str, say: Callable[[str], None]) -> dict[str, Contender]:
    """The layer without quantization, in float16 (float32 on a CPU), and a library's own dynamic int8."""
    if not given.x.is_cuda:
        operands = tuple(each.float() for each in (given.x, given.w, given.bias))
        reference = product_reference(*operands, relu=True)
        return willing(pytorch.cpu_bias_relu_products(*operands), reference, _SGEMM, say)
    operands = given.x, given.w, given.bias
    calls = {f"{name}_fp16": call for name, call in pytorch.bias_relu_products(*operands).items()}
    dense = product_reference(*operands, relu=True)
    found = willing(calls, dense, TOLERANCES["float16"], say)
    return found | willing(torchao.int8_layers(*operands, compile, "torchao"), dense, _LIBRARY, say)


def quantize_cases(rows: int, columns: int, device: torch.device) -> list[Case]:
    """`quantize_rows` of each dtype beside a copy that reads and writes as many bytes.

    The integers are checked here; the scales are where a product uses them.
    """
    cases = []
    for dtype in QUANTIZED:
        x = torch.randn((rows, columns), generator=torch.Generator(device).manual_seed(0), device=device)
        x = x.to(getattr(torch, dtype))
        q, _ = quantized(x)
        nbytes = x.numel() * x.element_size() + q.numel() + 4 * rows
        copied = torch.randn(max(1, nbytes // 8), generator=torch.Generator(device).manual_seed(1), device=device)
        copy = functools.partial(torch.neg, copied, out=torch.empty_like(copied))
        cases.append(
            Case(
                "quantize_rows",
                dtype,
                functools.partial(_quantized_rows, x),
                Reference(q.to(torch.float64)),
                flop=0,
                nbytes=nbytes,
                peers={"copy": Contender(Call(copy), Reference(-copied.to(torch.float64)), EXACT)},
                fields={"activations": None, "epilogue": "none", "out_dtype": "int8"},
            )
        )
    return cases


def _quantized_rows(x: Tensor) -> Tensor:
    return kernels.quantize_rows(x)[0]


def measure(
    cases: Iterable[Case],
    shape: tuple[int, ...],
    device: torch.device,
    environment: dict,
    compile: str = "off",
    repetitions: int = REPETITIONS,
) -> list[dict]:
    """Check and time the cases and their peers in one interleaved run; a row for each case and peer."""
    cases = list(cases)
    ours = {case.name: Contender(Call(case.call), case.reference, case.tolerance) for case in cases}
    theirs = {f"{peer} {case.dtype}": each for case in cases for peer, each in case.peers.items()}
    measured, telemetry = compete(ours, theirs, device, repetitions)
    return [
        row(
            op=case.op,
            dtype=case.dtype,
            shape=shape,
            kernel=measured[case.name],
            peer=peer,
            against=measured[f"{peer} {case.dtype}"],
            flop=case.flop,
            nbytes=case.nbytes,
            environment=environment,
            layout="nt",
            precision=None,
            compile=compile,
            **case.fields,
            **telemetry,
        )
        for case in cases
        for peer in case.peers
    ]


def bench(
    device: torch.device,
    *,
    ops: Iterable[str] = (),
    shapes: Iterable[Shape] = (),
    compile: str = "off",
    repetitions: int = REPETITIONS,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure each of `ops` (all that there are) at every shape, or at those that make sense on `device`.

    `compile` is the mode in which the peers that need it are compiled, or "off": then they are left out. Rows are
    appended to `out` as they come, `say` hears what is being measured and which peer refuses what.
    """
    if compile not in COMPILE:
        raise UserError(f"--compile {compile!r} is none of {', '.join(COMPILE)}")
    on_gpu = device.type == "cuda"
    ops, shapes = tuple(ops) or OPS, tuple(shapes)
    if compile != "off" and not {"gemm_int8", "gemm_weight_only"} & set(ops):
        raise UserError(f"--compile is of the peers of gemm_int8 and gemm_weight_only, not of {', '.join(ops)}")
    where = environment(device)
    ceilings = Ceilings(copy_gbps(device)) if on_gpu else None
    read = read_gbps(device) if on_gpu and "gemm_weight_only" in ops else None
    rows: list[dict] = []
    if out:
        append(out, ())  # refused now, and not after the first measurement

    def time(op: str, shape: tuple[int, ...], make: Callable[[], list[Case]], gbps: float | None = None) -> None:
        say(f"{op} {','.join(map(str, shape))}")
        if compile != "off":
            torch.compiler.reset()
        found = measure(make(), shape, device, where, compile, repetitions)
        if ceilings:
            ceilings.learn(found)
        found = [each | (ceilings.share(each, gbps) if ceilings else NO_CEILING) for each in found]
        rows.extend(found)
        if out:
            append(out, found)

    products = sorted(shapes or (GPU_SHAPES if on_gpu else CPU_SHAPES), key=lambda shape: shape != LARGEST)
    if "gemm_int8" in ops:
        for shape in products:
            time("gemm_int8", shape, lambda shape=shape: int8_cases(layer(shape, device), compile, say))
    if "gemm_weight_only" in ops:
        for shape in shapes or (GPU_WEIGHT_ONLY if on_gpu else CPU_WEIGHT_ONLY):
            time("gemm_weight_only", shape, lambda shape=shape: weight_only_cases(shape, device, compile, say), read)
    if "quantize_rows" in ops:
        matrices = dict.fromkeys((m, k) for m, _, k in shapes) or (GPU_QUANTIZED if on_gpu else CPU_QUANTIZED)
        for m, k in matrices:
            time("quantize_rows", (m, k), lambda m=m, k=k: quantize_cases(m, k, device))
    if "gemm_fp8" in ops:
        for shape in products:
            time("gemm_fp8", shape, lambda shape=shape: float8_cases(layer(shape, device), say))
    ceiling = None
    if ceilings:
        best = ", ".join(f"{dtype} {value:.3g}" for (dtype, _), value in ceilings.tflops.items()) or "not measured"
        ceiling = (
            f"of the ceiling: the least time that the work and the bytes allow, over the time taken, at the best "
            f"TOP/s of the bare products at 8192³ in this run ({best}) and a copy's {ceilings.gbps:.0f} GB/s"
        )
        if read:
            ceiling += f"; weight-only: reading {read:.0f} GB/s"
    return Result(rows, means(rows), ceiling)
