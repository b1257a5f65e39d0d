"""The command line. A command parses, calls one function, and prints.

torch and whatever imports it are imported inside the commands, so that help and usage errors come at once. Without
--json the result goes to standard output and progress to standard error; with it, standard output carries one JSON
object and nothing else. A UserError, and what the system refuses of a file, becomes a sentence and exit code 2; any
other exception is a fault of qsparse, and keeps its traceback.
"""

from __future__ import annotations

import enum
import errno
import io
import os
import re
import sys
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperGroup

from qsparse import __version__
from qsparse.bench import command as bench
from qsparse.commandline import (
    DataOption,
    Device,
    DeviceOption,
    JsonOption,
    example,
    print_json,
    progress_console,
    text_stream,
)
from qsparse.errors import UserError
from qsparse.quant.command import quantize, sensitivity
from qsparse.search.command import search
from qsparse.sparse.command import compress, formats, sparsify
from qsparse.sweep.command import sweep
from qsparse.train.config import BACKENDS, PRECISIONS, TrainConfig

USER_ERROR = 2
INTERRUPTED = 130
_REFUSALS = {errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ENOSPC, errno.EDQUOT}
"""What a system answers to a path or a write that is the user's: anywhere a file is touched, and nothing of ours."""
_NO_ROOM = "OutOfMemory|can't allocate memory|Storage size calculation overflowed"
"""What PyTorch answers where the memory, or an int64, does not hold what is asked for."""


def _out_of_memory(error: Exception) -> str | None:
    """The sentence for what NumPy, CuPy (MemoryError) or PyTorch (RuntimeError) could not allocate; None for others."""
    if not (isinstance(error, MemoryError) or re.search(_NO_ROOM, repr(error))):
        return None
    asked = re.search(r"allocate ([\d.]+ \w+)", str(error))
    return f"the memory does not hold this{f': {asked[1]} were asked for' if asked else ''}; ask for less at a time"


class _Group(TyperGroup):
    """Turns the user's mistakes and Ctrl-C into a sentence and an exit code."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an argument that is empty, as of a variable without a value: a path would be the current directory.

        Not while a shell completes a line, which is not run.
        """
        for before, argument in zip(["", *args], args, strict=False) if not ctx.resilient_parsing else ():
            if not argument or re.fullmatch(r"--[\w-]+=", argument):
                name = argument.rstrip("=") or (before if before.startswith("-") else "an argument")
                raise typer.BadParameter(f"{name} is empty: give it a value, or leave it out")
        return super().parse_args(ctx, args)

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except typer.BadParameter as error:
            error.message = error.message.removeprefix("Value error, ")  # of Pydantic, which Typer asks
            raise
        except UserError as error:
            typer.echo(f"Error: {error}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except OSError as error:
            if error.errno not in _REFUSALS:
                raise
            named = f"{error.filename}: " if error.filename else ""
            typer.echo(f"Error: {named}{error.strerror}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except (MemoryError, RuntimeError) as error:
            if not (sentence := _out_of_memory(error)):
                raise
            typer.echo(f"Error: {sentence}", err=True)
            raise typer.Exit(USER_ERROR) from None
        except KeyboardInterrupt as interrupt:
            typer.echo(f"\n{interrupt or 'interrupted'}", err=True)
            raise typer.Exit(INTERRUPTED) from None


app = typer.Typer(
    cls=_Group,
    help="Train, quantize and sparsify an MLP; accuracy, time and memory are those of the kernels that run.",
    no_args_is_help=True,
    rich_markup_mode=None,
    pretty_exceptions_enable=False,
)


HiddenOption = Annotated[
    list[str] | None,
    typer.Option(
        metavar="N[,N...]", show_default="256", help="Widths of the hidden layers, also one an option; 0 for none."
    ),
]
Backend = enum.StrEnum("Backend", BACKENDS)
Precision = enum.StrEnum("Precision", PRECISIONS)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"qsparse {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    pass


@app.command(epilog=example("qsparse train --hidden 256 --epochs 5 --seed 1"))
def train(
    hidden: HiddenOption = None,
    epochs: Annotated[int | None, typer.Option(min=1, show_default=str(TrainConfig.epochs))] = None,
    batch_size: Annotated[int | None, typer.Option(min=1, show_default=str(TrainConfig.batch_size))] = None,
    lr: Annotated[
        float | None,
        typer.Option(show_default=str(TrainConfig.lr), help="First learning rate; it decays linearly to zero."),
    ] = None,
    momentum: Annotated[float | None, typer.Option(show_default=str(TrainConfig.momentum))] = None,
    weight_decay: Annotated[float | None, typer.Option(show_default=str(TrainConfig.weight_decay))] = None,
    seed: Annotated[int | None, typer.Option(min=0, show_default=str(TrainConfig.seed))] = None,
    device: Annotated[
        Device | None,
        typer.Option(
            show_default="auto", help="auto takes the GPU when there is one and CuPy is installed, else the CPU."
        ),
    ] = None,
    backend: Annotated[
        Backend | None,
        typer.Option(
            show_default="auto",
            help="PyTorch, NumPy or C on the CPU, our kernels (cuda) on a GPU; auto is cuda on a GPU, else torch.",
        ),
    ] = None,
    precision: Annotated[
        Precision | None,
        typer.Option(show_default="fp32", help="Of backend cuda's products: 11 bits in tf32 and fp16, 8 in bf16."),
    ] = None,
    data: Annotated[
        str | None,
        typer.Option(
            metavar="auto|mnist|mnist-5k|DIR",
            show_default="auto",
            help="mnist-5k needs no network; DIR holds the four IDX files.",
        ),
    ] = None,
    validation: Annotated[
        int | None,
        typer.Option(
            min=0, show_default="5000, of mnist-5k 500", help="Training images held out for validation; 0 for none."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            show_default="the next number under runs/",
            help="The run directory (of --resume: the newest).",
        ),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace the run that --out holds.")] = False,
    resume: Annotated[bool, typer.Option("--resume", help="Go on with an interrupted run.")] = False,
    as_json: JsonOption = False,
) -> None:
    """Train an MLP on MNIST into a new run directory."""
    named = {
        "hidden": _hidden(hidden),
        "epochs": epochs,
        "batch_size": batch_size,
        "lr": lr,
        "momentum": momentum,
        "weight_decay": weight_decay,
        "seed": seed,
        "device": device.value if device else None,
        "backend": backend.value if backend else None,
        "precision": precision.value if precision else None,
        "data": data,
        "validation": validation,
    }
    given = {field: value for field, value in named.items() if value is not None}
    config = TrainConfig(**given)
    if resume and force:
        raise UserError("--resume goes on with a run and --force replaces it: give one of them")
    if force and out is None:
        raise UserError("--force replaces the run in --out: give that too, or leave both out for a new directory")

    from qsparse.train import run

    console = progress_console()
    if resume:
        trained = run.resume(given, out=out, console=console)
    else:
        trained = run.train(config, out=out, force=force, console=console)
    if trained is None:  # rank 0 of torchrun's processes says it
        return
    if as_json:
        print_json(trained.to_json())
    else:
        print(f"test accuracy {trained.metrics[-1]['test_accuracy']:.2%}, saved in {trained.run}")


app.command(epilog=example("qsparse quantize runs/1 --dtype int8"))(quantize)
app.command(epilog=example("qsparse sensitivity runs/1 --dtype int8,int4wo"))(sensitivity)
app.command(epilog=example("qsparse search runs/1 --trials 100"))(search)
app.command(epilog=example("qsparse sweep sweep.toml --workers 2"))(sweep)


app.command(epilog=example("qsparse sparsify runs/1 --density 0.1 --finetune-epochs 2"))(sparsify)
app.command(epilog=example("qsparse compress runs/1 --dtype int8 --density 0.1"))(compress)
app.command(epilog=example("qsparse formats --shape 256,784 --density 0.1"))(formats)


@app.command(epilog=example("qsparse report runs/1 runs/2 --html report.html"))
def report(
    runs: Annotated[
        list[Path] | None,
        typer.Argument(
            metavar="RUNS", show_default=False, help="Runs, sweeps, files of rows; left out: all under runs/."
        ),
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(metavar="PNG", show_default="report.png in the run, or beside the runs", help="The picture."),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="HTML", show_default=False, help="Write a page, too, that needs nothing else to open."),
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Show and draw what was measured. One table; accuracy against latency and against bytes."""
    from qsparse import collect
    from qsparse.report import show

    collected = collect.collect(runs or (), out=out, html=html, console=progress_console())
    show(collected.rows, text_stream(as_json))
    print(f"picture: {collected.picture}", file=text_stream(as_json))
    if collected.page:
        print(f"page: {collected.page}", file=text_stream(as_json))
    if as_json:
        print_json(collected.to_json())


@app.command(epilog=example("qsparse doctor"))
def doctor(as_json: JsonOption = False) -> None:
    """Say what this machine runs, and how to get what is missing."""
    from qsparse import doctor

    found = doctor.report()
    for line in doctor.lines(found):
        print(line, file=text_stream(as_json))
    if as_json:
        print_json(found)


@app.command(epilog=example("qsparse demo --data mnist-5k"))
def demo(data: DataOption = "auto", device: DeviceOption = Device.auto, as_json: JsonOption = False) -> None:
    """Run the whole line once: train, quantize, sparsify, report."""
    from qsparse.demo import demo as run_demo

    result = run_demo(data=data, device=device.value, console=progress_console(), tables=text_stream(as_json))
    if as_json:
        print_json(result)


@app.command(epilog=example("qsparse ladder --epochs 2 --rounds 3"))
def ladder(
    hidden: HiddenOption = None,
    epochs: Annotated[int, typer.Option(min=1, help="Epochs of each training.")] = 2,
    rounds: Annotated[int, typer.Option(min=1, help="Trainings of each backend, in turn.")] = 3,
    device: Annotated[Device, typer.Option(help="cpu and cuda leave the other one's backends out.")] = Device.auto,
    batch_size: Annotated[int, typer.Option(min=1)] = TrainConfig.batch_size,
    lr: Annotated[float, typer.Option()] = TrainConfig.lr,
    seed: Annotated[int, typer.Option(min=0)] = TrainConfig.seed,
    data: DataOption = "auto",
    validation: Annotated[int, typer.Option(min=0, help="Training images held out.")] = 0,
    out: Annotated[
        Path | None, typer.Option(metavar="JSONL", show_default=False, help="Append the rows to this file.")
    ] = None,
    as_json: JsonOption = False,
) -> None:
    """Time an epoch of training by each backend. Exits with 1 if a backend's losses are not PyTorch's."""
    given = {"hidden": _hidden(hidden)} if hidden else {}
    config = TrainConfig(**given, epochs=epochs, batch_size=batch_size, lr=lr, seed=seed)

    from qsparse import data as datasets
    from qsparse.bench.harness import append
    from qsparse.train.ladder import ladder as climb
    from qsparse.train.ladder import show
    from qsparse.train.progress import say as say_on

    console = progress_console()

    def say(sentence: str) -> None:
        say_on(console, sentence)

    if out is not None:
        append(out, ())  # refused now, and not after the training
    climbed = climb(datasets.load(data, validation, say), config, rounds=rounds, device=device.value, say=say)
    show(climbed.rows, text_stream(as_json))
    if out is not None:
        append(out, climbed.rows)
        print(f"rows: {out}", file=text_stream(as_json))
    if as_json:
        print_json(climbed.to_json())
    if climbed.wrong:
        raise typer.Exit(bench.WRONG)


app.add_typer(bench.app, name="bench")


def _hidden(named: list[str] | None) -> tuple[int, ...] | None:
    """Return the hidden layers that --hidden names: None when it was not given, none for a single 0."""
    if named is None or not named:  # older Typers pass an empty list for an option that was not given
        return None
    widths = [width for text in named for width in text.split(",")]
    for width in widths:
        if not re.fullmatch(r"\d{1,10}", width.strip(), re.ASCII):
            raise UserError(f"--hidden is {width!r}: it must be a width, or several with commas between, as 256,128")
    found = tuple(map(int, widths))
    return () if found == (0,) else found


def _mend_streams() -> None:
    """Let no text fail to print: not where a stream is closed, nor for a character that it cannot encode."""
    for name in ("stdin", "stdout", "stderr"):  # in the order of their descriptors, so that each gets its own
        stream = getattr(sys, name)
        if stream is None:
            setattr(sys, name, open(os.devnull, "r" if name == "stdin" else "w", errors="replace"))  # noqa: SIM115
        elif name != "stdin" and isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(errors="replace")


def main() -> None:
    """Run the command line: the entry point `qsparse`."""
    _mend_streams()
    app()
