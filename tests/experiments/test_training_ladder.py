"""Experiment 03: its tables, and on a GPU its recipes."""

import importlib.util
import sys
from pathlib import Path

import pytest

from qsparse import data

EXPERIMENT = Path(__file__).resolve().parents[2] / "experiments" / "03_training_ladder"
ENVIRONMENT = {"gpu": "a GPU", "torch": "2.11", "cuda": "13.0", "date": "2026-11-30T00:00:00+00:00"}


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("training_ladder_run", EXPERIMENT / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # its dataclass looks itself up there
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


def row(backend: str, seconds: float | None, seed: int = 0) -> dict:
    ratio = None if seconds is None else 0.09 / seconds
    where = {"backend": backend, "sizes": [784, 256, 10], "batch_size": 64, "dtype": "tf32", "seed": seed}
    where["peer"] = "torch_graph"
    return {
        **where,
        "epoch_s": seconds,
        "ratio": ratio,
        "eager_ratio": ratio if seed == 0 else None,  # the eager rung is climbed once
        "accuracy": 0.97 + seed / 100 + (backend == "cuda") / 1000,
    } | ENVIRONMENT


def test_a_line_for_each_backend_with_medians_and_means(run):
    rows = [row("cuda", 0.004), row("torch_graph", 0.09), row("cuda", 0.005, 1), row("cuda", 0.009, 2)]
    lines = [line for line in run.ladder_table(rows).splitlines() if line.startswith("| 784")]
    assert lines[0] == "| 784-256-10 | 64 | `cuda` | tf32 | 5.00 | 18.00x | 22.5x | 98.10% | +0.10 | 3 |"
    assert lines[1] == "| 784-256-10 | 64 | `torch_graph` | tf32 | 90.00 | 1.00x | 1.0x | 97.00% | - | 1 |"


def test_accuracies_are_compared_with_those_of_the_same_seed(run):
    rows = [row("cuda", 0.004), row("cuda", 0.004, 1), row("torch_graph", 0.09), row("torch_graph", 0.09, 1)]
    rows[1]["accuracy"] += 0.002
    assert run.accuracy_changes(rows[:2], rows) == pytest.approx([0.1, 0.3])
    assert "| +0.20 ± 1.27 | 2 |" in run.ladder_table(rows)  # Student's t of one degree of freedom, 12.71, times 0.1
    assert run.accuracy_changes(rows[2:], rows) == []


def test_rows_are_kept_as_they_come(run, tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("an older row\n")

    def climbing():
        yield [{"a": 1}, {"a": 2}]
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        run._keep(path, climbing())
    assert run._read(path) == [{"a": 1}, {"a": 2}]


def test_a_wrong_backend_has_no_time(run):
    assert "| wrong | wrong | wrong |" in run.ladder_table([row("cuda", None)])


def test_the_tables_stand_in_the_readme(run, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(run.README.read_text())
    monkeypatch.setattr(run, "README", readme)
    run.publish()
    assert readme.read_text() == run.README.read_text() == (EXPERIMENT / "README.md").read_text()


@pytest.mark.gpu
def test_a_recipe_reaches_its_accuracy(run, real_data):
    dataset = data.load(str(real_data), 0).to("cuda")
    found = run.time_to_accuracy(dataset, run.RECIPES[0], seed=0)
    assert found["reached"], found["accuracy"]
    assert found["device_ms"] > 0
