"""The table of experiments/05_quantization is that of its rows, and the rows are what its configurations name."""

import importlib.util
import json
from pathlib import Path

HERE = Path(__file__).parents[2] / "experiments" / "05_quantization"


def script():
    spec = importlib.util.spec_from_file_location("quantization_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_table_is_of_the_rows():
    run = script()
    rows = [json.loads(line) for line in run.ROWS.read_text().splitlines()]
    assert run.table(rows) in run.README.read_text()
    names = ["baseline", *(config.variant for config in run.configs())]
    assert [row["variant"] for row in rows] == names * len(run.SEEDS)
    for row in rows:
        assert row["simulated"] == ("-sim" in row["variant"])
        assert (row["latency_us"] is None) == row["simulated"]
