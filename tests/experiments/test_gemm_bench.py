"""The tables of the GEMM bench are those of its rows and counters, and the counters are read as they are meant."""

import csv
import importlib.util
import io
import json
from pathlib import Path

import pytest

from qsparse.bench.shapes import GPU_TUNED
from qsparse.kernels._gemm_sm90 import TABLE

HERE = Path(__file__).resolve().parents[2] / "experiments" / "10_gemm_bench"


def load(stem):
    spec = importlib.util.spec_from_file_location(f"gemm_bench_{stem}", HERE / f"{stem}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def draw():
    return load("draw")


@pytest.fixture(scope="module")
def counters():
    return load("counters")


def between(draw, begin, end):
    return (HERE / "README.md").read_text().split(begin)[1].split(end)[0].strip()


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_the_tables_are_those_of_the_rows(draw):
    assert between(draw, draw.BEGIN, draw.END) == draw.tables(lines_of(draw.ROWS))


def test_the_unseen_are_in_no_table_and_as_measured(draw):
    shapes = load("unseen").SHAPES
    assert not set(shapes) & set(GPU_TUNED)
    tuned = [entry for entry in json.loads(TABLE.read_text()) if (entry["dtype"], entry["layout"]) == ("float16", "nt")]
    assert not {tuple(entry["shape"]) for entry in tuned} & set(shapes)
    if draw.UNSEEN.exists():
        rows = lines_of(draw.UNSEEN)
        assert {tuple(row["shape"]) for row in rows} == set(shapes)
        assert between(draw, draw.BEGIN_UNSEEN, draw.END_UNSEEN) == draw.unseen(rows)


def test_the_counters_are_those_that_were_read(draw):
    assert between(draw, draw.BEGIN_COUNTERS, draw.END_COUNTERS) == draw.counters(lines_of(draw.COUNTERS))


def report(counters, kernels):
    """What ncu prints: words of its own, names, units, and a line a kernel of (name, nanoseconds)."""
    text = io.StringIO("==PROF== Connected to process 1\n")
    text.seek(0, io.SEEK_END)
    metrics = list(counters.METRICS.values())
    lines = csv.writer(text, quoting=csv.QUOTE_ALL)
    lines.writerow(["ID", "Kernel Name", *metrics])
    lines.writerow(["", "", *("ns" if metric.startswith("gpu__time") else "" for metric in metrics)])
    for i, (name, ns) in enumerate(kernels):
        values = [f"{ns:,}" if metric.startswith("gpu__time") else "1,000.5" for metric in metrics]
        lines.writerow([i, name, *values])
    return text.getvalue()


def test_a_report_becomes_a_row_for_each_shape_and_library(counters):
    ours, theirs = ("void gemm_sm90<__half, 1>(TensorMap)", 4000), ("nvjet_sm90_hsh_64x8", 5000)
    kernels = [ours, ("gemm_split_sum<__half>(float *)", 1500), theirs] + [ours, theirs] * (len(counters.SHAPES) - 1)
    rows = counters.parse(report(counters, kernels))
    assert [(tuple(row["shape"]), row["ours"]) for row in rows] == [
        (shape, ours) for shape in counters.SHAPES for ours in (True, False)
    ]
    assert [row["kernels"] for row in rows[:3]] == [2, 1, 1]
    assert [row["us"] for row in rows[:2]] == [4.0, 5.0]
    assert rows[0]["l2_to_sm_bytes"] == 1000.5 * 32


def test_a_report_of_anything_else_is_refused(counters):
    with pytest.raises(SystemExit, match="1 products were profiled, not 10"):
        counters.parse(report(counters, [("gemm_sm90", 1)]))
