"""`qsparse sweep`: parses, calls one function, and prints. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from qsparse.commandline import Device, DeviceOption, JsonOption, print_json, progress_console, text_stream

_SHOWN = 10


def sweep(
    file: Annotated[Path, typer.Argument(metavar="TOML", help="The grid: [train], [[quantize]], [[sparsify]].")],
    out: Annotated[
        Path | None,
        typer.Option(metavar="DIR", show_default="sweeps/ and the file's name", help="Where rows.jsonl grows."),
    ] = None,
    workers: Annotated[
        int | None,
        typer.Option(
            min=1,
            show_default="1 on a CPU, one a GPU on GPUs",
            help="Processes at a time; on a CPU they disturb each other's times.",
        ),
    ] = None,
    retry: Annotated[bool, typer.Option("--retry", help="Measure the cells that failed again.")] = False,
    device: DeviceOption = Device.auto,
    as_json: JsonOption = False,
) -> None:
    """Measure every combination of a TOML file. Interrupted or killed, the same command goes on where it was."""
    from qsparse.sweep.run import sweep as run_sweep

    console = progress_console()
    done = run_sweep(file, out=out, workers=workers, device=device.value, retry=retry, console=console)
    for title, error in list(done.failed.items())[:_SHOWN]:
        print(f"failed: {title}: {error}", file=text_stream(as_json))
    print(
        f"{done.measured} of {done.cells} cells measured, {len(done.failed)} failed; "
        f"`qsparse report {done.directory}` shows them",
        file=text_stream(as_json),
    )
    if as_json:
        print_json(done.to_json())
