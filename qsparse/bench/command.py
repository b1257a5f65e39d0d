"""`qsparse bench`: parses, calls one benchmark, prints. Imports no torch until a command runs."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer

from qsparse.bench.shapes import parse_shape, parse_sizes
from qsparse.commandline import Device, DeviceOption, JsonOption, choices, example, print_json, text_stream
from qsparse.errors import refuse_idle

WRONG = 1
"""The exit code where a kernel's output was not that of the reference."""

app = typer.Typer(
    help="Time the kernels beside the libraries'.",
    no_args_is_help=True,
    rich_markup_mode=None,
)

Dtype = choices("Dtype", "float16", "bfloat16", "float32", "int8")
Layout = choices("Layout", "nt", "nn", "tn")
Tier = choices("Tier", "simt", "sm80", "sm90")
Op = choices("Op", "gemm_int8", "gemm_fp8", "gemm_weight_only", "quantize_rows")
SparseOp = choices(
    "SparseOp",
    *("spmm_csr", "spmm_coo", "spmm_csr_transposed", "spmm_bitmap", "spmm_entries", "sddmm"),
    *("gemm_24", "gemm_int8_24"),
)
SparseDtype = choices("SparseDtype", "float32", "float16", "bfloat16")
Compile = choices("Compile", "off", "default", "max-autotune-no-cudagraphs")

ShapesOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="M,N,K", show_default="a list of each size", help="Batch rows, outputs, inputs; repeat it for more."
    ),
]
CompileOption = Annotated[
    Compile, typer.Option("--compile", help="How torch.compile makes the peers that need it; off leaves them out.")
]
RepetitionsOption = Annotated[
    int | None,
    typer.Option(
        min=1,
        show_default="100",
        help="Timed replays on a GPU, fewer for calls beyond 5 ms; a CPU gets a fixed time.",
    ),
]
OutOption = Annotated[
    Path | None, typer.Option(metavar="JSONL", show_default=False, help="Append the rows to this file.")
]


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _once(chosen: Iterable | None) -> tuple:
    """What a repeatable option names, each once."""
    return tuple(dict.fromkeys(chosen or ()))


def _values(chosen) -> tuple[str, ...]:
    return _once(each.value for each in chosen or ())


def _shapes(texts: list[str] | None) -> tuple:
    return _once(parse_shape(each) for each in texts or ())


def _run(bench, device: Device, out: Path | None, as_json: bool, **options) -> None:
    """Run a benchmark and print its result; ends with 1 if a kernel was wrong."""
    from qsparse.device import resolve_device

    given = {name: value for name, value in options.items() if value is not None}
    result = bench(resolve_device(device.value, _say), **given, out=out, say=_say)
    text = text_stream(as_json)
    result.show(text)
    if out:
        print(f"rows: {out}", file=text)
    if as_json:
        print_json(result.to_json())
    if result.wrong:
        raise typer.Exit(WRONG)


def _tune(tune, device: Device, table: Path | None, as_json: bool, others: dict, **options) -> None:
    """Fill a tuning table, the one that is read unless another is named, and say where it is.

    others: options of the benchmark that tuning has not, which are refused where they are given.
    """
    refuse_idle([{name: "a benchmark, and --tune is none" for name, value in others.items() if value is not None}])
    from qsparse.device import resolve_device

    found = tune(resolve_device(device.value, _say), **options, table=table, say=_say)
    print(f"{len(found.entries)} entries measured, written to {found.table}", file=text_stream(as_json))
    if as_json:
        print_json(found.to_json())


@app.command(epilog=example("qsparse bench gemm --dtype float16 --shapes 4096,4096,4096"))
def gemm(
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(show_default="all that this device does", help="Repeat it for more; int8 on a CPU or by --tune."),
    ] = None,
    shapes: ShapesOption = None,
    layout: Annotated[
        list[Layout] | None,
        typer.Option(
            show_default="nt",
            help="nt is the forward product, nn the input's and tn the weight's gradient; repeatable.",
        ),
    ] = None,
    device: DeviceOption = Device.auto,
    tier: Annotated[
        Tier | None, typer.Option(show_default="the best that the card has", help="Time this tier of ours instead.")
    ] = None,
    duel: Annotated[
        bool | None,
        typer.Option(
            "--duel/--no-duel", show_default="on a GPU", help="Add 4096³ in float32 on the CPU, beside the GPU."
        ),
    ] = None,
    repetitions: RepetitionsOption = None,
    out: OutOption = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune",
            help="Time every configuration for these shapes instead, 50 times, keep the fastest in the table, or in "
            "that of --out, and fit what each costs.",
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time the dense product, plain and with bias and ReLU. Exits with 1 if a kernel gave a wrong output."""
    chosen = {"dtypes": _values(dtype), "shapes": _shapes(shapes), "layouts": _values(layout) or ("nt",)}
    if tune:
        from qsparse.bench.tune import tune as tune_gemm

        more = {} if repetitions is None else {"repetitions": repetitions}
        _tune(tune_gemm, device, out, as_json, {"tier": tier, "duel": duel}, **chosen, **more)
        return

    from qsparse.bench.gemm import bench

    tier_name = tier.value if tier else None
    _run(bench, device, out, as_json, **chosen, tier=tier_name, duel=duel, repetitions=repetitions)


@app.command(epilog=example("qsparse bench int8 --shapes 64,1024,784"))
def int8(
    op: Annotated[list[Op] | None, typer.Option(show_default="all", help="What to time; repeat it for more.")] = None,
    shapes: ShapesOption = None,
    device: DeviceOption = Device.auto,
    compile: CompileOption = Compile.off,
    repetitions: RepetitionsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time the int8 products and the quantization before them. Exits with 1 if a kernel gave a wrong output."""
    options = {"ops": _values(op), "shapes": _shapes(shapes), "compile": compile.value, "repetitions": repetitions}

    from qsparse.bench.int8 import bench

    _run(bench, device, out, as_json, **options)


@app.command(epilog=example("qsparse bench spmm --shapes 64,1024,784 --density 0.1"))
def spmm(
    op: Annotated[
        list[SparseOp] | None, typer.Option(show_default="all", help="What to time; repeat it for more.")
    ] = None,
    dtype: Annotated[
        list[SparseDtype] | None, typer.Option(show_default="float32 and float16", help="Repeatable.")
    ] = None,
    shapes: ShapesOption = None,
    density: Annotated[
        list[float] | None,
        typer.Option(min=1e-6, max=1, show_default="0.3, 0.1, 0.05, 0.02", help="Share of entries; repeatable."),
    ] = None,
    device: DeviceOption = Device.auto,
    repetitions: RepetitionsOption = None,
    out: OutOption = None,
    tune: Annotated[
        bool,
        typer.Option(
            "--tune", help="Time CSR, both kinds of tiles and dense instead, and keep the times in the table."
        ),
    ] = False,
    as_json: JsonOption = False,
) -> None:
    """Time sparse products, and say where they beat dense ones. Exits with 1 if one was wrong."""
    chosen = {"dtypes": _values(dtype), "shapes": _shapes(shapes), "densities": _once(density)}
    if tune:
        from qsparse.bench.tune_spmm import tune as tune_spmm

        _tune(tune_spmm, device, out, as_json, {"op": op or None, "repetitions": repetitions}, **chosen)
        return

    from qsparse.bench.spmm import bench

    _run(bench, device, out, as_json, **chosen, ops=_values(op), repetitions=repetitions)


@app.command(epilog=example("qsparse bench mlp"))
def mlp(
    network: Annotated[
        list[str] | None,
        typer.Option(metavar="SIZES", show_default="784,256,10 and wider", help="Widths, such as 784,256,10."),
    ] = None,
    batch: Annotated[
        list[int] | None, typer.Option(min=1, show_default="1 to 10,000", help="Rows; repeatable.")
    ] = None,
    device: DeviceOption = Device.auto,
    compile: CompileOption = Compile.off,
    repetitions: RepetitionsOption = None,
    out: OutOption = None,
    as_json: JsonOption = False,
) -> None:
    """Time whole int8 networks beside the libraries'. Exits with 1 if one gave a wrong output."""
    networks = _once(parse_sizes(each) for each in network or ())
    options = {
        "networks": networks,
        "batches": _once(batch),
        "compile": compile.value,
        "repetitions": repetitions,
    }

    from qsparse.bench.mlp import bench

    _run(bench, device, out, as_json, **options)
