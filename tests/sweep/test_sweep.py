"""A sweep loses and repeats nothing: however it is killed, its rows are those of one that ran through."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qsparse import cli
from qsparse.errors import UserError
from qsparse.sweep import run
from qsparse.sweep.run import sweep
from qsparse.sweep.worker import answer

GRID = """
[train]
hidden = [8, [12, 8]]
epochs = 2
data = "mnist-5k"

[[quantize]]
dtype = ["int8", "fp16", "int9"]

[[quantize]]
dtype = "int4wo"
simulate = true
granularity = ["channel", "group"]

[[sparsify]]
density = [0.5, 0.1]
format = ["csr", "coo"]
finetune_epochs = 1

[measure]
batches = [1]
budget_s = 0.002
"""
CELLS = 2 * (1 + 3 + 2 + 4)
FAILING = 2
# What the clock says.
_TIMES = {"latency_us", "latency_us_p10", "latency_us_p90", "speedup", "repetitions", "seconds", "date"}


def command(directory: Path, *more: str) -> list[str]:
    return [sys.executable, "-m", "qsparse", "sweep", "sweep.toml", "--device", "cpu", *more]


def rows_of(directory: Path) -> list[dict]:
    return [json.loads(line) for line in (directory / "sweeps/sweep/rows.jsonl").read_text().splitlines()]


def without_times(rows: list[dict]) -> list[str]:
    return sorted(json.dumps({k: v for k, v in row.items() if k not in _TIMES}, sort_keys=True) for row in rows)


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory) -> Path:
    directory = tmp_path_factory.mktemp("uninterrupted")
    (directory / "sweep.toml").write_text(GRID)
    subprocess.run(command(directory), cwd=directory, check=True, capture_output=True, timeout=300)
    return directory


def started(directory: Path, *more: str) -> subprocess.Popen:
    return subprocess.Popen(
        command(directory, *more),
        cwd=directory,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        text=True,
        # a suite in the background of a shell inherits an ignored SIGINT, and so would the process
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.SIG_DFL),
    )


def lines(directory: Path) -> int:
    file = directory / "sweeps/sweep/rows.jsonl"
    return file.read_bytes().count(b"\n") if file.exists() else 0


def killed_after(directory: Path, count: int, delay: float) -> None:
    """Start the sweep and kill it `delay` seconds after the file holds `count` rows."""
    process = started(directory)
    try:
        while lines(directory) < count:
            assert process.poll() is None, process.stderr.read()
            time.sleep(0.002)
        time.sleep(delay)
    finally:
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    assert process.returncode == -signal.SIGKILL


def test_killed_three_times_it_has_the_rows_of_one_that_ran_through(uninterrupted, tmp_path):
    (tmp_path / "sweep.toml").write_text(GRID)
    moments = random.Random()  # what it says must hold at any moment
    kept = 0
    for _ in range(3):
        killed_after(tmp_path, kept + moments.randint(0, 4), moments.uniform(0, 0.1))
        kept = lines(tmp_path)
        assert kept < CELLS
    before = rows_of(tmp_path)[:kept]
    subprocess.run(command(tmp_path), cwd=tmp_path, check=True, capture_output=True, timeout=300)
    rows = rows_of(tmp_path)
    assert rows[:kept] == before
    assert len(rows) == CELLS
    assert without_times(rows) == without_times(rows_of(uninterrupted))
    assert not list((tmp_path / "sweeps/sweep/networks").glob(".cell-*"))


def test_ctrl_c_says_how_to_go_on_and_leaves_no_process(tmp_path):
    (tmp_path / "sweep.toml").write_text(GRID)
    process = started(tmp_path)
    while lines(tmp_path) < 2:
        assert process.poll() is None, process.stderr.read()
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, said = process.communicate(timeout=60)  # until the workers, which hold the pipe's other end, are gone
    assert process.returncode == cli.INTERRUPTED
    assert f"of {CELLS} cells are in sweeps/sweep/rows.jsonl; the same command goes on" in said
    assert lines(tmp_path) == len(rows_of(tmp_path)) < CELLS


def test_two_workers_measure_the_same(uninterrupted, tmp_path):
    (tmp_path / "sweep.toml").write_text(GRID)
    subprocess.run(command(tmp_path, "--workers", "2"), cwd=tmp_path, check=True, capture_output=True, timeout=300)
    rows, other = rows_of(tmp_path), rows_of(uninterrupted)
    assert {row["workers"] for row in rows} == {2}
    for row in (*rows, *other):
        row.pop("workers"), row.pop("threads", None)
    assert without_times(rows) == without_times(other)


def test_a_failing_cell_is_a_row_and_the_others_go_on(uninterrupted):
    rows = rows_of(uninterrupted)
    failed = [row for row in rows if "error" in row]
    assert len(failed) == FAILING
    assert all("int9" in row["error"] and row["cell"]["quantize"] == {"dtype": "int9"} for row in failed)
    assert all(row["accuracy"] > 0.1 and row["cell"] for row in rows if "error" not in row)
    assert len({row["run"] for row in rows}) == 2


def test_a_finished_sweep_measures_nothing(uninterrupted, monkeypatch):
    monkeypatch.chdir(uninterrupted)
    before = rows_of(uninterrupted)
    result = CliRunner().invoke(cli.app, ["sweep", "sweep.toml", "--device", "cpu", "--json"])
    said = json.loads(result.stdout)
    assert (said["cells"], said["measured"], len(said["failed"])) == (CELLS, CELLS - FAILING, FAILING)
    assert rows_of(uninterrupted) == before
    assert not Path("sweeps/sweep/rows.jsonl").read_text().endswith("\n\n")


def test_retry_measures_the_failed_cells_again(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    grid = Path("sweep.toml")
    grid.write_text("[train]\nhidden = 8\nepochs = 1\ndata = 'nowhere'\n[quantize]\ndtype = 'int8'\n")
    failed = sweep(grid, device="cpu")
    assert failed.measured == 0
    assert "nowhere" in rows_of(tmp_path)[0]["error"]
    assert "its network" in rows_of(tmp_path)[1]["error"]  # which never ran
    assert sweep(grid, device="cpu").failed == failed.failed
    assert len(rows_of(tmp_path)) == 2
    assert sweep(grid, device="cpu", retry=True).measured == 0
    assert len(rows_of(tmp_path)) == 4


def test_a_process_that_dies_is_one_failed_cell(tmp_path, monkeypatch):
    """The first worker dies by what it imports first."""
    (tmp_path / "sitecustomize.py").write_text(
        "import os, sys\n"
        "if sys.argv[0] == '-m' and not os.path.exists('died'):\n"
        "    open('died', 'w').close(); os.kill(os.getpid(), 9)\n"
    )
    monkeypatch.setenv("PYTHONPATH", f"{tmp_path}{os.pathsep}{os.environ.get('PYTHONPATH', '')}")
    monkeypatch.chdir(tmp_path)
    grid = Path("sweep.toml")
    grid.write_text("[train]\nhidden = 8\nepochs = 1\nseed = [0, 1]\ndata = 'mnist-5k'\n[measure]\nbatches = [1]\n")
    done = sweep(grid, device="cpu")
    assert done.measured == 1
    assert "SIGKILL" in next(iter(done.failed.values()))
    assert sweep(grid, device="cpu", retry=True).measured == 2


def test_the_worker_answers_with_what_went_wrong(tmp_path):
    job = {"network": str(tmp_path / "n"), "device": "cpu", "measuring": {}}
    cell = {"train": {"epochs": 0}, "kind": "baseline", "options": {}}
    assert "epochs" in answer({**job, "cell": cell})["error"]
    fault = answer({**job, "cell": {**cell, "train": {"what": 1}}})
    assert "TypeError" in fault["error"]
    assert fault["fault"] is True


def test_after_a_fault_another_process_goes_on(tmp_path, monkeypatch):
    """As where a GPU is of no more use to the process: a product that no memory holds is one."""
    monkeypatch.chdir(tmp_path)
    grid = Path("sweep.toml")
    grid.write_text(
        "[train]\nhidden = 8\nepochs = 1\ndata = 'mnist-5k'\n"
        f"[[sparsify]]\ndensity = 0.5\nformat = 'auto'\nauto = 'time'\nauto_batch = [{2**40}, 1]\n"
        "[measure]\nbatches = [1]\nbudget_s = 0.001\n"
    )
    processes = []
    start = run._Worker._start
    monkeypatch.setattr(run._Worker, "_start", lambda self: processes.append(start(self)) or processes[-1])
    done = sweep(grid, device="cpu")
    assert done.measured == 2
    assert "RuntimeError" in next(iter(done.failed.values()))
    assert len(processes) == 2
    assert all(process.returncode is not None for process in processes)
    assert not any("fault" in row for row in rows_of(tmp_path))


@pytest.mark.parametrize("workers", [0, -1])
def test_workers_are_counted(tmp_path, workers):
    (tmp_path / "sweep.toml").write_text(GRID)
    with pytest.raises(UserError, match="workers"):
        sweep(tmp_path / "sweep.toml", out=tmp_path / "out", workers=workers, device="cpu")
