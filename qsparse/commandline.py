"""What the commands share: options that mean the same in each, and where tables, progress and JSON go.

Imports no torch, so that help and usage errors come at once.
"""

from __future__ import annotations

import enum
import json
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast

import typer

if TYPE_CHECKING:
    from rich.console import Console


def choices(name: str, *values: str) -> type[enum.StrEnum]:
    """The type of an option that takes one of `values`."""
    return cast(type[enum.StrEnum], enum.StrEnum(name, {value.replace("-", "_"): value for value in values}))


class Device(enum.StrEnum):
    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


RunArgument = Annotated[
    Path | None,
    typer.Argument(metavar="RUN", show_default=False, help="The run directory; left out: the newest run."),
]
DeviceOption = Annotated[
    Device, typer.Option(help="auto takes the GPU when there is one and CuPy is installed, else the CPU.")
]
DataOption = Annotated[
    str,
    typer.Option(metavar="auto|mnist|mnist-5k|DIR", help="mnist-5k needs no network; DIR holds the four IDX files."),
]
JsonOption = Annotated[
    bool, typer.Option("--json", help="Print one JSON object on standard output, all else on standard error.")
]


def example(command: str) -> str:
    """The end of a command's help."""
    return f"Example: {command}"


def progress_console() -> Console:
    """Return where progress goes."""
    from rich.console import Console

    return Console(stderr=True)


def text_stream(as_json: bool) -> Any:
    """Return the stream of tables and sentences."""
    return sys.stderr if as_json else sys.stdout


def print_json(value: dict[str, Any]) -> None:
    print(json.dumps(value, allow_nan=False))


def print_compressed(compressed: Any, as_json: bool) -> None:
    """Print the table of a `Compressed`, or of several, and its JSON if that was asked for."""
    from qsparse.report import show

    show(compressed.rows, text_stream(as_json))
    if as_json:
        print_json(compressed.to_json())
