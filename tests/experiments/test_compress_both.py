"""The tables of the experiment are those of its rows, and int8 in 2:4 is as small as it is said to be."""

import importlib.util
import json
import tomllib
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "experiments" / "07_compress_both"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("compress_both_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]


def test_the_tables_are_those_of_the_rows(run, rows):
    text = (HERE / "README.md").read_text()
    assert text.split(run.BEGIN)[1].split(run.END)[0].strip() == f"{run.accuracies(rows)}\n\n{run.times(rows)}"


def test_every_case_has_a_row_a_seed_and_a_busy_machines_times_are_not_kept(run, rows):
    config = tomllib.loads((HERE / "config.toml").read_text())
    found = sorted((row["variant"], row["seed"]) for row in rows if row["device"] == "cpu")
    names = ["baseline", *(case["label"] for case in config["case"])]
    assert found == sorted((name, seed) for name in names for seed in range(config["cpu"]["seeds"]))
    assert all(row[field] is None for row in rows for field in run.TIMES if row["device"] == "cpu")


def test_int8_in_2_of_4_is_less_than_16_hundredths_of_float32(rows):
    both = [row for row in rows if row["format"] == "2:4" and row["dtype"] == "int8"]
    assert both
    assert all(row["weight_ratio"] < 0.16 for row in both)
    assert all(row["order"] in ("prune-first", "joint") for row in both)


def test_a_gpus_rows_make_the_second_table_and_its_sentence(run, rows, tmp_path):
    first = [row for row in rows if row["seed"] == 0 and row["device"] == "cpu"]
    times = {"1": 8.0, "4096": 100.0}
    gpu = [{**row, "device": "cuda", "gpu": "A GPU", "cuda": "13.0", "latency_us": dict(times),
            "speedup": {"1": 1.0, "4096": 2.0}} for row in first]  # fmt: skip
    next(row for row in gpu if row["variant"].startswith("2:4 int8"))["latency_us"]["4096"] = 80.0
    said = run.times(gpu)
    assert "At batch 4,096 int8 in 2:4 takes 80.0 µs and int8 alone 100.0 µs, 1.25 times as long" in said
    run.draw([*first, *gpu], tmp_path / "figure.png")
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


def test_one_that_cannot_run_leaves_the_others(run, monkeypatch, capsys):
    def measure(models, test, *, details, peers=True):
        if "bad" in models:
            raise RuntimeError("no such kernel")
        return [{"variant": name, **details.get(name, {})} for name in [*models, *(["torch"] if peers else [])]]

    monkeypatch.setattr(run, "measure", measure)
    names = ["baseline", "int8", "bad", "2:4 int8"]
    rows = run.timed(dict.fromkeys(names), None, {name: {"seed": 0} for name in names}, {})
    assert [row["variant"] for row in rows] == ["baseline", "int8", "torch", "2:4 int8"]
    assert "failed: bad: no such kernel" in capsys.readouterr().out
