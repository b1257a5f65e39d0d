"""Experiment 08: its sweep is one that qsparse reads, its table is that of its rows, and a front is one."""

import importlib.util
import json
from pathlib import Path

import pytest

from qsparse.quant import QuantConfig
from qsparse.report.rows import device_name
from qsparse.sweep import grid

HERE = Path(__file__).resolve().parents[2] / "experiments" / "08_pareto"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("pareto_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]


def test_every_cell_is_computed_by_a_kernel():
    cells = grid.read(HERE / "sweep.toml").cells
    assert len({cell.network for cell in cells}) == 1
    for cell in cells:
        if cell.kind == "quantize":
            assert not QuantConfig(**cell.options).simulate  # and the options go together


def test_the_rows_are_those_of_the_sweep_measured(run, rows):
    cells = {cell.key for cell in grid.read(HERE / "sweep.toml").cells}
    for name in {device_name(row) for row in rows}:
        own = [row for row in rows if device_name(row) == name]
        assert {grid.key(row["cell"]) for row in own if not row["peer"]} <= cells
        assert sum(row["variant"] == "baseline" for row in own) == 1
        for row in own:
            assert not row["simulated"]
            assert set(row["latency_us"]) == {"1", "64", "1024", "10000"}
            assert run.kind(row) in run.KINDS


def test_the_tables_are_those_of_the_rows(run, rows):
    text = (HERE / "README.md").read_text()
    assert text.split(run.BEGIN)[1].split(run.END)[0].strip() == run.tables(rows)


def test_a_front_is_what_no_other_beats(run):
    points = [(3, 0.9), (1, 0.5), (2, 0.5), (2, 0.8), (4, 0.9), (5, 0.95)]
    assert run.front_of(points) == [(1, 0.5), (2, 0.8), (3, 0.9), (5, 0.95)]


def test_rows_of_a_device_replace_those_of_the_same(run):
    def row(gpu, accuracy):
        return {"gpu": gpu, "device": "cuda" if gpu else "cpu", "accuracy": accuracy}

    old = [row(None, 1), row("H200", 2)]
    assert run.merged(old, [row("H200", 3)]) == [row(None, 1), row("H200", 3)]
    assert run.merged(old, [row(None, 4)]) == [row("H200", 2), row(None, 4)]
