"""The whole line in one go: train, quantize, sparsify, report, each step with the command that does it alone."""

from __future__ import annotations

import shutil
import sys
from typing import IO, Any

from rich.console import Console

from qsparse import report
from qsparse.collect import collect
from qsparse.train.config import TrainConfig
from qsparse.train.progress import say, shortest
from qsparse.train.run import train
from qsparse.variants import quantize_run, sparsify_run

DTYPE = "int8"
DENSITY = 0.1
FORMAT = "csr"
FINETUNE_EPOCHS = 2


def demo(*, data: str, device: str, console: Console, tables: IO[str]) -> dict[str, Any]:
    """Train a new run with the default recipe, compress it in two ways, and report.

    data, device: as for `train`. console: where progress and the commands go. tables: where the closing table goes.
    Returns what `qsparse demo --json` prints. Raises UserError as the steps do.
    """
    config = TrainConfig(data=data, device=device)
    chosen = "" if data == TrainConfig.data else f" --data {data}"
    on = "" if device == TrainConfig.device else f" --device {device}"

    _step(console, "Train a network on MNIST", f"qsparse train{chosen}{on}")
    trained = train(config, console=console)
    run = trained.run
    device = trained.config["train"]["device"]  # chosen, and said, once

    _step(console, f"Quantize it to {DTYPE}", f"qsparse quantize {run} --dtype {DTYPE}{on}")
    quantized = quantize_run(run, DTYPE, device=device, console=console)

    _step(
        console,
        f"Keep {DENSITY:.0%} of its weights, and train those a little more",
        f"qsparse sparsify {run} --density {DENSITY} --format {FORMAT} --finetune-epochs {FINETUNE_EPOCHS}{on}",
    )
    sparse = sparsify_run(run, DENSITY, FORMAT, finetune_epochs=FINETUNE_EPOCHS, device=device, console=console)

    _step(console, "Report what was measured", f"qsparse report {run}")
    collected = collect([run], console=console)
    report.show(collected.rows, tables)
    say(
        console,
        f"\nThe picture is {collected.picture}. In Python: qsparse.load('{quantized.directory}'). "
        f"More options: qsparse train --help.{how_to_run()}",
    )
    return {
        **collected.to_json(),
        "run": str(run),
        "saved": [str(quantized.directory), str(sparse.directory)],
        "test_accuracy": trained.metrics[-1]["test_accuracy"],
    }


def how_to_run() -> str:
    """Return a sentence that says what to write for `qsparse`, empty where that is on the path."""
    if shutil.which("qsparse"):
        return ""
    program = shortest(sys.argv[0])
    if program.name != "qsparse":
        return f" Write `{shortest(sys.executable)} -m qsparse` for qsparse."
    activate = program.with_name("activate")
    first = f", or first `. {activate}`" if activate.exists() else ""
    return f" Write `{program}` for qsparse{first}."


def _step(console: Console, what: str, command: str) -> None:
    say(console, f"\n{what}:\n  $ {command}", style="bold")
