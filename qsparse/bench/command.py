"""`qsparse bench`: parses, calls one benchmark, prints. Imports no torch until a command runs."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from qsparse.bench.shapes import parse_shape, parse_sizes
from qsparse.commandline import example

WRONG = 1
"""The exit code where a kernel's output was not that of the reference."""

app = typer.Typer(
    help="Time the kernels beside the libraries'.",
    no_args_is_help=True,
    rich_markup_mode=None,
)


class Device(enum.StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


class Dtype(enum.StrEnum):
    float16 = "float16"
    bfloat16 = "bfloat16"
    float32 = "float32"
    int8 = "int8"


class Layout(enum.StrEnum):
    nt = "nt"
    nn = "nn"
    tn = "tn"


class Tier(enum.StrEnum):
    simt = "simt"
    sm80 = "sm80"
    sm90 = "sm90"


class Op(enum.StrEnum):
    gemm_int8 = "gemm_int8"
    gemm_fp8 = "gemm_fp8"
    gemm_weight_only = "gemm_weight_only"
    quantize_rows = "quantize_rows"


class SparseOp(enum.StrEnum):
    spmm_csr = "spmm_csr"
    spmm_coo = "spmm_coo"
    spmm_csr_transposed = "spmm_csr_transposed"


class SparseDtype(enum.StrEnum):
    float32 = "float32"
    float16 = "float16"
    bfloat16 = "bfloat16"


class Compile(enum.StrEnum):
    off = "off"
    default = "default"
    max_autotune = "max-autotune-no-cudagraphs"


DEVICE = typer.Option(help="auto takes the GPU when there is one and CuPy is installed.")
SHAPES = typer.Option(
    metavar="M,N,K", show_default="a list of each size", help="Batch rows, outputs, inputs; repeat it for more."
)
REPETITIONS = typer.Option(min=1, help="Timed replays on a GPU, fewer for calls beyond 5 ms; a CPU gets a fixed time.")
OUT = typer.Option(metavar="JSONL", show_default=False, help="Append the rows to this file.")
JSON = typer.Option("--json", help="Print one JSON object on standard output, all else on standard error.")
COMPILE = typer.Option("--compile", help="How torch.compile makes the peers that need it; off leaves them out.")


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _finish(result, out: Path | None, as_json: bool) -> None:
    """Print a benchmark's result, and end with 1 if a kernel was wrong."""
    text = sys.stderr if as_json else sys.stdout
    result.show(text)
    if out:
        print(f"rows: {out}", file=text)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    if result.wrong:
        raise typer.Exit(WRONG)


@app.command(epilog=example("qsparse bench gemm --dtype float16 --shapes 4096,4096,4096"))
def gemm(
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(show_default="all that this device does", help="Repeat it for more; int8 on a CPU only."),
    ] = None,
    shapes: Annotated[list[str] | None, SHAPES] = None,
    layout: Annotated[
        list[Layout] | None,
        typer.Option(
            show_default="nt",
            help="nt is the forward product, nn the input's and tn the weight's gradient; repeatable.",
        ),
    ] = None,
    device: Annotated[Device, DEVICE] = Device.auto,
    tier: Annotated[
        Tier | None, typer.Option(show_default="the best that the card has", help="Time this tier of ours instead.")
    ] = None,
    duel: Annotated[
        bool | None,
        typer.Option(
            "--duel/--no-duel", show_default="on a GPU", help="Add 4096³ in float32 on the CPU, beside the GPU."
        ),
    ] = None,
    repetitions: Annotated[int, REPETITIONS] = 100,
    out: Annotated[Path | None, OUT] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Time every configuration for these shapes and keep the fastest in the table."),
    ] = False,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Time the dense product, plain and with bias and ReLU. Exits with 1 if a kernel gave a wrong output."""
    chosen = {
        "dtypes": tuple(each.value for each in dtype or ()),
        "shapes": tuple(parse_shape(each) for each in shapes or ()),
        "layouts": tuple(each.value for each in layout or ()) or ("nt",),
    }
    if tune:
        from qsparse.bench.tune import tune as tune_gemm
        from qsparse.device import resolve_device

        found = tune_gemm(resolve_device(device.value, _say), **chosen, table=out, say=_say)
        print(
            f"{len(found.entries)} shapes tuned, written to {found.table}", file=sys.stderr if as_json else sys.stdout
        )
        if as_json:
            print(json.dumps(found.to_json(), allow_nan=False))
        return

    from qsparse.bench.gemm import bench
    from qsparse.device import resolve_device

    result = bench(
        resolve_device(device.value, _say),
        **chosen,
        tier=tier.value if tier else None,
        duel=duel,
        repetitions=repetitions,
        out=out,
        say=_say,
    )
    _finish(result, out, as_json)


@app.command(epilog=example("qsparse bench int8 --shapes 64,1024,784"))
def int8(
    op: Annotated[list[Op] | None, typer.Option(show_default="all", help="What to time; repeat it for more.")] = None,
    shapes: Annotated[list[str] | None, SHAPES] = None,
    device: Annotated[Device, DEVICE] = Device.auto,
    compile: Annotated[Compile, COMPILE] = Compile.off,
    repetitions: Annotated[int, REPETITIONS] = 100,
    out: Annotated[Path | None, OUT] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Time the int8 products and the quantization before them. Exits with 1 if a kernel gave a wrong output."""
    parsed = tuple(parse_shape(each) for each in shapes or ())

    from qsparse.bench.int8 import bench
    from qsparse.device import resolve_device

    result = bench(
        resolve_device(device.value, _say),
        ops=tuple(each.value for each in op or ()),
        shapes=parsed,
        compile=compile.value,
        repetitions=repetitions,
        out=out,
        say=_say,
    )
    _finish(result, out, as_json)


@app.command(epilog=example("qsparse bench spmm --shapes 64,1024,784 --density 0.1"))
def spmm(
    op: Annotated[
        list[SparseOp] | None, typer.Option(show_default="all", help="What to time; repeat it for more.")
    ] = None,
    dtype: Annotated[
        list[SparseDtype] | None, typer.Option(show_default="float32 and float16", help="Repeatable.")
    ] = None,
    shapes: Annotated[list[str] | None, SHAPES] = None,
    density: Annotated[
        list[float] | None,
        typer.Option(min=1e-6, max=1, show_default="0.3, 0.1, 0.05, 0.02", help="Share of entries; repeatable."),
    ] = None,
    device: Annotated[Device, DEVICE] = Device.auto,
    repetitions: Annotated[int, REPETITIONS] = 100,
    out: Annotated[Path | None, OUT] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Time products with sparse weights, and say where they begin to beat dense ones. Exits with 1 if one was wrong."""
    parsed = tuple(parse_shape(each) for each in shapes or ())

    from qsparse.bench.spmm import bench
    from qsparse.device import resolve_device

    result = bench(
        resolve_device(device.value, _say),
        ops=tuple(each.value for each in op or ()),
        dtypes=tuple(each.value for each in dtype or ()),
        shapes=parsed,
        densities=tuple(density or ()),
        repetitions=repetitions,
        out=out,
        say=_say,
    )
    _finish(result, out, as_json)


@app.command(epilog=example("qsparse bench mlp"))
def mlp(
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", show_default="784,256,10 and wider", help="Widths, such as 784,256,10."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, show_default="1 to 10,000", help="Rows; repeatable.")
    ] = None,
    device: Annotated[Device, DEVICE] = Device.auto,
    compile: Annotated[Compile, COMPILE] = Compile.off,
    repetitions: Annotated[int, REPETITIONS] = 100,
    out: Annotated[Path | None, OUT] = None,
    as_json: Annotated[bool, JSON] = False,
) -> None:
    """Time whole int8 networks beside the libraries'. Exits with 1 if one gave a wrong output."""
    networks = tuple(parse_sizes(each) for each in network or ())

    from qsparse.bench.mlp import bench
    from qsparse.device import resolve_device

    result = bench(
        resolve_device(device.value, _say),
        networks=networks,
        batches=tuple(batch or ()),
        compile=compile.value,
        repetitions=repetitions,
        out=out,
        say=_say,
    )
    _finish(result, out, as_json)
