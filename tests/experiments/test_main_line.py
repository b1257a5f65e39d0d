"""The tables of the main line, in its folder and on the front page, are those of its rows."""

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "experiments" / "00_main_line"


@pytest.fixture(scope="module")
def main_line():
    spec = importlib.util.spec_from_file_location("main_line_table", HERE / "table.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_rows(main_line):
    rows = [json.loads(line) for line in main_line.ROWS.read_text().splitlines()]
    for readme, table in ((main_line.README, main_line.table(rows)), (main_line.FRONT, main_line.short_table(rows))):
        assert readme.read_text().split(main_line.BEGIN)[1].split(main_line.END)[0].strip() == table


def row(variant, us, **fields):
    return {
        "variant": variant,
        "sizes": [784, 256, 10],
        "accuracy": 0.975,
        "accuracy_change": -0.25,
        "agreement": 0.99,
        "latency_us": {"1": us, "64": 10.0, "1024": 20.0, "10000": 100.0},
        "speedup": {"1": 12 / us, "64": 1.0, "1024": 1.0, "10000": 1.0},
        "weight_bytes": 205392,
        "weight_ratio": 0.25,
        "kernel": "mlp_int8:sm90",
        "seed": 0,
        "gpu": "Some GPU",
        "torch": "2",
        "cuda": "13",
        "date": "2026-11-30T00:00:00",
        "commit": None,
        "l2": "cold",
    } | fields


def test_a_variant_stands_with_its_newest_row(main_line):
    rows = [row("int8", 12.0), row("fp16", 8.0), row("int8", 6.0, commit="0123456789")]
    (line,) = (line for line in main_line.table(rows).splitlines() if line.startswith("| int8"))
    assert line.startswith("| int8 | 97.50 % | -0.25 | 99.00 % | 6.0 (2.00x) | 10.0 (1.00x) |")
    assert line.endswith("| 205,392 (25.0 %) | mlp_int8:sm90 |")
    short = main_line.short_table(rows)
    assert "| int8 | 97.50 % | -0.25 | 6.0 (2.00x) | 20.0 (1.00x) | 100.0 (1.00x) | 205,392 |" in short
    assert short.endswith("Some GPU, PyTorch 2, CUDA 13, 2026-11-30 at commit 0123456. L2 cache cold.")
    assert main_line.short_table(rows[:1]).endswith("CUDA 13, 2026-11-30. L2 cache cold.")
