"""A grid and a directory in; every cell that has no row yet is measured, and its row appended."""

from __future__ import annotations

import contextlib
import datetime
import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean
from typing import Any

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

from qsparse import checkpoint
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.sweep import grid
from qsparse.sweep.grid import BASELINE, Cell
from qsparse.sweep.journal import Journal
from qsparse.train.progress import say

SWEEPS = "sweeps"
NETWORKS = "networks"
LOG = "workers.log"


@dataclass(frozen=True)
class SweepResult:
    """Where the rows are, and how many cells the grid has, were measured, and failed, over all starts of the sweep."""

    directory: Path
    cells: int
    measured: int
    failed: dict[str, str]
    """A failed cell's title -> its error."""

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse sweep --json` prints."""
        rows = str(self.directory / checkpoint.ROWS)
        return {"rows": rows, "cells": self.cells, "measured": self.measured, "failed": self.failed}


def sweep(
    path: str | Path,
    *,
    out: str | Path | None = None,
    workers: int | None = None,
    device: str = "auto",
    retry: bool = False,
    console: Console | None = None,
) -> SweepResult:
    """Measure the cells of the TOML file `path` (see grid.py) that have no row in OUT/rows.jsonl yet.

    Networks are trained into OUT/networks/, once each. A finished cell is one row (see `measure`, with the fields
    `cell`, its settings, `seconds` and `workers`); a failing one is a row with the field `error`. However the sweep
    ends, the next one on the same directory loses no row and repeats no cell.

    out: left out, sweeps/ and the file's name. workers: processes at a time; left out, one on a CPU, one a GPU on GPUs.
    On a CPU they share the cores evenly, and disturb each other's times. retry: measure failed cells again.
    Raises UserError as `grid.read` and `Journal`, for a device that is not there, and more workers than GPUs.
    """
    plan = grid.read(path)
    place = resolve_device(device, lambda sentence: say(console, sentence)).type
    workers = _count(workers, place)
    directory = checkpoint.make_directory(out or Path(SWEEPS) / Path(path).stem)
    with Journal(directory) as journal:
        for scratch in (directory / NETWORKS).glob(".cell-*"):  # of a sweep that was killed
            shutil.rmtree(scratch, ignore_errors=True)
        queue = _Queue(plan.cells, journal, workers, retry)
        if queue.done:
            say(console, f"{queue.done} of {len(plan.cells)} cells are done already; going on in {directory}")
        checkpoint.make_directory(directory / NETWORKS)
        jobs = {"device": place, "measuring": plan.measuring}
        with _display(console, queue) as moved, open(directory / LOG, "ab") as log:
            try:
                _work(
                    queue, [_Worker(number, workers, place, log, directory) for number in range(workers)], jobs, moved
                )
            except KeyboardInterrupt:
                raise KeyboardInterrupt(
                    f"interrupted: {queue.done} of {len(plan.cells)} cells are in {journal.path}; "
                    "the same command goes on"
                ) from None
        rows = queue.rows
    failed = {cell.title + f" of {cell.network}": rows[cell.key]["error"] for cell in plan.cells if _failed(rows, cell)}
    return SweepResult(directory, len(plan.cells), len(plan.cells) - len(failed), failed)


def _failed(rows: dict[str, dict[str, Any]], cell: Cell) -> bool:
    return "error" in rows[cell.key]


def _count(workers: int | None, place: str) -> int:
    if workers is not None and workers < 1:
        raise UserError(f"--workers is {workers}: it must be at least 1")
    if place == "cpu":
        return workers or 1
    gpus = torch.cuda.device_count()
    if (workers or 1) > gpus:
        raise UserError(f"--workers is {workers}: each takes a GPU of its own, and there are {gpus} here")
    return workers or gpus


class _Queue:
    """The cells that are left, for several threads. A network's cells wait for its baseline, which trains it."""

    def __init__(self, cells: list[Cell], journal: Journal, workers: int, retry: bool) -> None:
        self._journal, self._workers = journal, workers
        self.rows = {grid.key(row["cell"]): row for row in journal.rows if isinstance(row.get("cell"), dict)}
        if retry:
            self.rows = {key: row for key, row in self.rows.items() if "error" not in row}
        self._left = [cell for cell in cells if cell.key not in self.rows]
        self._running: list[Cell] = []
        self._changed = threading.Condition()
        self._seconds: dict[str, list[float]] = {}
        for row in self.rows.values():
            self._timed(row)
        self.cells = len(cells)
        self.stopped = False

    @property
    def done(self) -> int:
        return self.cells - len(self._left) - len(self._running)

    def take(self) -> Cell | None:
        """The next cell that can be measured, waiting for one; None when none is left."""
        with self._changed:
            while self._left and not self.stopped:
                for cell in self._left:
                    if cell.kind == BASELINE or self._baseline(cell) is not None:
                        self._left.remove(cell)
                        self._running.append(cell)
                        return cell
                self._changed.wait()
            return None

    def network_error(self, cell: Cell) -> str | None:
        """Why the network of `cell` could not be trained or measured, if so."""
        baseline = None if cell.kind == BASELINE else self._baseline(cell)
        return baseline.get("error") if baseline else None

    def finish(self, cell: Cell, found: dict[str, Any], network: Path) -> None:
        """Write the row of a cell that was taken."""
        with self._changed:
            row = {**found, "cell": cell.settings, "workers": self._workers}
            if "error" in row:
                now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
                row |= {"run": str(network), "variant": cell.title, "date": now}
            self._journal.append(row)
            self.rows[cell.key] = row
            self._running.remove(cell)
            self._timed(row)
            self._changed.notify_all()

    def stop(self) -> None:
        """Give out no more cells."""
        with self._changed:
            self.stopped = True
            self._changed.notify_all()

    def seconds_left(self) -> float | None:
        """How long what is left may take by what cells of its kind took so far; None before the first one is done."""
        known = [second for seconds in self._seconds.values() for second in seconds]
        if not known:
            return None
        counts = Counter(cell.kind for cell in (*self._left, *self._running))
        return sum(count * fmean(self._seconds.get(kind, known)) for kind, count in counts.items()) / self._workers

    def _baseline(self, cell: Cell) -> dict[str, Any] | None:
        return self.rows.get(Cell(cell.train, BASELINE, {}).key)

    def _timed(self, row: dict[str, Any]) -> None:
        if "error" not in row and isinstance(row.get("seconds"), int | float):
            kind = next((kind for kind in ("quantize", "sparsify") if kind in row["cell"]), BASELINE)
            self._seconds.setdefault(kind, []).append(row["seconds"])


class _Worker:
    """A process of worker.py, started when the first job comes, and again after one that ended it."""

    def __init__(self, number: int, workers: int, place: str, log: Any, directory: Path) -> None:
        self._log, self._directory = log, directory
        self._process: subprocess.Popen[str] | None = None
        self._environment = dict(os.environ)
        if place == "cuda":
            visible = os.environ.get("CUDA_VISIBLE_DEVICES")
            gpus = visible.split(",") if visible else [str(gpu) for gpu in range(torch.cuda.device_count())]
            self._environment["CUDA_VISIBLE_DEVICES"] = gpus[number]
        elif workers > 1:
            threads = max(1, len(os.sched_getaffinity(0)) // workers)
            self._environment["OMP_NUM_THREADS"] = str(threads)

    def network(self, cell: Cell) -> Path:
        return self._directory / NETWORKS / cell.network

    def measure(self, cell: Cell, options: dict[str, Any]) -> dict[str, Any]:
        """The fields of the row of `cell`; or `error`, also where the process ended."""
        process = self._process = self._process or self._start()
        assert process.stdin
        assert process.stdout
        job = {"cell": asdict(cell), "network": str(self.network(cell)), **options}
        reply = ""
        with contextlib.suppress(BrokenPipeError):
            print(json.dumps(job), file=process.stdin, flush=True)
            reply = process.stdout.readline()
        if not reply.endswith("\n"):
            self._process = None
            return {"error": f"its process ended {_end(process)}; see {self._directory / LOG}"}
        row: dict[str, Any] = json.loads(reply)
        if row.pop("fault", False):  # another process measures the next cell
            self.close()
        return row

    def kill(self) -> None:
        """End the process, whatever it does: a thread that waits for its answer gets none."""
        if process := self._process:
            process.kill()

    def close(self) -> None:
        """End the process and let go of it, once nobody waits for its answer."""
        process, self._process = self._process, None
        if process:
            process.kill()
            _end(process)

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "qsparse.sweep.worker"],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=self._log,
            text=True,
            env=self._environment,
            start_new_session=True,  # Ctrl-C is the sweep's, which ends its processes
        )


def _end(process: subprocess.Popen[str]) -> str:
    """Wait for a process to end, and say how it did."""
    with process:
        code = process.wait()
    return f"by {signal.Signals(-code).name}" if code < 0 else f"with code {code}"


def _work(queue: _Queue, workers: list[_Worker], options: dict[str, Any], moved: Callable[[Cell], None]) -> None:
    """Measure all that is left, a thread a worker. Raises what a thread raised, and KeyboardInterrupt."""
    faults: list[BaseException] = []

    def loop(worker: _Worker) -> None:
        try:
            while cell := queue.take():
                error = queue.network_error(cell)
                found = {"error": f"its network: {error}"} if error else worker.measure(cell, options)
                if queue.stopped:
                    return
                queue.finish(cell, found, worker.network(cell))
                moved(cell)
        except BaseException as fault:
            faults.append(fault)
            queue.stop()

    threads = [threading.Thread(target=loop, args=(worker,)) for worker in workers]
    try:
        for thread in threads:
            thread.start()
        for thread in threads:
            while thread.is_alive():
                thread.join(0.2)
    finally:
        queue.stop()
        for worker in workers:
            worker.kill()
        for thread in threads:
            thread.join()
        for worker in workers:
            worker.close()
    if faults:
        raise faults[0]


@contextlib.contextmanager
def _display(console: Console | None, queue: _Queue) -> Any:
    """A bar with the time left on a terminal, a line a cell elsewhere: yields what is called after each cell."""
    terminal = console is not None and console.is_terminal
    bar = Progress(
        TextColumn("cells"),
        BarColumn(),
        MofNCompleteColumn(),
        TextColumn("{task.fields[left]}"),
        console=console,
        disable=not terminal,
    )
    task = bar.add_task("", total=queue.cells, completed=queue.done, left=_left(queue))

    def moved(cell: Cell) -> None:
        row = queue.rows[cell.key]
        if terminal:
            bar.update(task, completed=queue.done, left=_left(queue))
        if not terminal or "error" in row:
            found = row.get("error") or f"{row['accuracy']:.2%}, {row['seconds']:.1f} s"
            say(console, f"[{queue.done}/{queue.cells}] {cell.network} {cell.title}: {found}; {_left(queue)}")

    with bar:
        yield moved


def _left(queue: _Queue) -> str:
    seconds = queue.seconds_left()
    if seconds is None:
        return "time left unknown yet"
    if not seconds:
        return "done"
    for unit, size in (("h", 3600), ("min", 60)):
        if seconds >= size:
            return f"about {seconds / size:.1f} {unit} left"
    return f"about {seconds:.0f} s left"
