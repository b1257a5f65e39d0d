"""`python -m qsparse.sweep.worker`: a job a line on standard input, its row (or its error) a line on standard output.

A process of its own, so that what ends it ends one cell and not the sweep. It ends when its input does, at once: nobody
would read its answer, and the sweep that goes on would meet it.
"""

from __future__ import annotations

import json
import os
import queue
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from qsparse import checkpoint, variants
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.quant import QuantConfig
from qsparse.sweep.grid import BASELINE, Cell
from qsparse.train import run as training
from qsparse.train.config import TrainConfig


def perform(cell: Cell, network: Path, device: str, measuring: dict[str, Any]) -> dict[str, Any]:
    """The row of `cell`, whose network is trained in directory `network` if that was not done yet.

    device: "cpu" or "cuda". measuring: options of `measure`. The row of a baseline that has peers (on a GPU) holds
    theirs in its field `peers`. Raises whatever keeps the cell from being measured.
    """
    _train(network, cell.train, device)
    if cell.kind == BASELINE:
        return _baseline(network, device, measuring)
    with tempfile.TemporaryDirectory(prefix=".cell-", dir=network.parent) as scratch:
        for name in (checkpoint.CONFIG, checkpoint.METRICS, checkpoint.MODEL):
            os.symlink((network / name).absolute(), Path(scratch) / name)
        options: dict[str, Any] = {"device": device, "measuring": {**measuring, "peers": False}}
        if cell.kind == "quantize":
            done = variants.quantize_run(scratch, QuantConfig(**_hashable(cell.options)), **options)
        else:
            done = variants.sparsify_run(scratch, **cell.options, **options)
    row = next(row for row in done.rows if row["variant"] == done.variant)
    if cell.kind == "sparsify" and "lr" in cell.options:  # which that variant's name does not tell
        row["variant"] += f"-lr{cell.options['lr']:g}"
    return {**row, "run": str(network)}


def _train(network: Path, settings: Any, device: str) -> None:
    if checkpoint.is_finished(network):
        return
    if (network / checkpoint.CONFIG).exists():  # an earlier sweep was killed meanwhile
        training.resume({}, out=network)
    else:
        training.train(TrainConfig(**settings, device=device), out=network)


def _baseline(network: Path, device: str, measuring: dict[str, Any]) -> dict[str, Any]:
    own = {
        "file_bytes": (network / checkpoint.MODEL).stat().st_size,
        "seed": training.read_train_config(network).seed,
    }
    target = resolve_device(device)
    row, *peers = measure(
        {BASELINE: checkpoint.load(network, target)},
        training.load_dataset(network).test,
        device=target,
        run=str(network),
        details={BASELINE: own},
        **measuring,
    )
    return {**row, "peers": peers} if peers else row


def _hashable(options: Any) -> dict[str, Any]:
    return {name: tuple(value) if isinstance(value, list) else value for name, value in options.items()}


def answer(job: dict[str, Any]) -> dict[str, Any]:
    """What the sweep writes of a job: the row, or the error, with the seconds that it took.

    `fault` is true where the error is none of a user's: a GPU may be of no more use to this process.
    """
    began = time.monotonic()
    try:
        row = perform(Cell(**job["cell"]), Path(job["network"]), job["device"], job["measuring"])
        json.dumps(row, allow_nan=False)  # a row that no file can hold is an error like others
    except UserError as error:
        row = {"error": str(error)}
    except Exception as error:
        row = {"error": f"{type(error).__name__}: {error}", "fault": True}
    return {**row, "seconds": round(time.monotonic() - began, 3)}


def _read(jobs: queue.SimpleQueue[str]) -> None:
    for line in sys.stdin:
        jobs.put(line)
    os._exit(0)


def main() -> None:
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what a library prints is no answer
    jobs: queue.SimpleQueue[str] = queue.SimpleQueue()
    threading.Thread(target=_read, args=(jobs,), daemon=True).start()
    while True:
        print(json.dumps(answer(json.loads(jobs.get()))), file=out, flush=True)


if __name__ == "__main__":
    main()
