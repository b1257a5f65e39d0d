"""`qsparse bench`: parses, calls one benchmark, prints. Imports no torch until a command runs."""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import Annotated

import typer

from qsparse.bench.shapes import parse_shape

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


@app.callback()
def _bench() -> None:
    """Keeps `gemm` a command of its own while it is the only one."""


@app.command()
def gemm(
    dtype: Annotated[
        list[Dtype] | None,
        typer.Option(show_default="all that this device does", help="Repeat it for more; int8 on a CPU only."),
    ] = None,
    shapes: Annotated[
        list[str] | None,
        typer.Option(
            metavar="M,N,K", show_default="a list of each size", help="Batch rows, outputs, inputs; repeat it for more."
        ),
    ] = None,
    layout: Annotated[
        list[Layout] | None,
        typer.Option(
            show_default="nt",
            help="nt is the forward product, nn the input's and tn the weight's gradient; repeatable.",
        ),
    ] = None,
    device: Annotated[Device, typer.Option(help="auto takes the GPU when there is one and CuPy is installed.")] = (
        Device.auto
    ),
    tier: Annotated[
        Tier | None, typer.Option(show_default="the best that the card has", help="Time this tier of ours instead.")
    ] = None,
    duel: Annotated[
        bool | None,
        typer.Option(
            "--duel/--no-duel", show_default="on a GPU", help="Add 4096³ in float32 on the CPU, beside the GPU."
        ),
    ] = None,
    repetitions: Annotated[
        int, typer.Option(min=1, help="Timed replays on a GPU, fewer for calls beyond 5 ms; a CPU gets a fixed time.")
    ] = 100,
    out: Annotated[
        Path | None, typer.Option(metavar="JSONL", show_default=False, help="Append the rows to this file.")
    ] = None,
    tune: Annotated[
        bool,
        typer.Option("--tune", help="Time every configuration for these shapes and keep the fastest in the table."),
    ] = False,
    as_json: Annotated[
        bool, typer.Option("--json", help="Print one JSON object on standard output, all else on standard error.")
    ] = False,
) -> None:
    """Time the dense product, plain and with bias and ReLU. Exits with 1 if a kernel gave a wrong output."""
    text = sys.stderr if as_json else sys.stdout
    chosen = {
        "dtypes": tuple(each.value for each in dtype or ()),
        "shapes": tuple(parse_shape(each) for each in shapes or ()),
        "layouts": tuple(each.value for each in layout or ()) or ("nt",),
    }

    def say(line: str) -> None:
        print(line, file=sys.stderr, flush=True)

    if tune:
        from qsparse.bench.tune import tune as tune_gemm
        from qsparse.device import resolve_device

        found = tune_gemm(resolve_device(device.value, say), **chosen, table=out, say=say)
        print(f"{len(found.entries)} shapes tuned, written to {found.table}", file=text)
        if as_json:
            print(json.dumps(found.to_json(), allow_nan=False))
        return

    from qsparse.bench.gemm import bench
    from qsparse.bench.tables import show
    from qsparse.device import resolve_device

    result = bench(
        resolve_device(device.value, say),
        **chosen,
        tier=tier.value if tier else None,
        duel=duel,
        repetitions=repetitions,
        out=out,
        say=say,
    )
    show(result.rows, result.means, result.ceiling, text)
    if out:
        print(f"rows: {out}", file=text)
    if as_json:
        print(json.dumps(result.to_json(), allow_nan=False))
    if result.wrong:
        raise typer.Exit(WRONG)
