"""The table of the sparsity experiment is that of its rows, and no time measured on a busy machine is among them."""

import importlib.util
import itertools
import json
from pathlib import Path

import pytest
import torch

from qsparse.sparse.finetune import sparse_steps_pay

HERE = Path(__file__).resolve().parents[2] / "experiments" / "06_sparsity"


@pytest.fixture(scope="module")
def run():
    spec = importlib.util.spec_from_file_location("sparsity_run", HERE / "run.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def rows():
    return [json.loads(line) for line in (HERE / "rows.jsonl").read_text().splitlines()]


def test_the_table_is_that_of_the_rows(run, rows):
    text = (HERE / "README.md").read_text()
    assert text.split(run.BEGIN)[1].split(run.END)[0].strip() == run.table(rows)


def test_every_case_has_a_row_a_seed_and_no_time(run, rows):
    seeds = {row["seed"] for row in rows}
    assert len(seeds) >= 3
    cases = sorted((row["pattern"] or str(row["density_asked"]), row["label"], row["seed"]) for row in rows)
    asked = sorted(
        (options.get("pattern") or str(options["density"]), label, seed)
        for label, options in run.CASES
        for seed in seeds
    )
    assert cases == asked
    assert all(row[field] is None for row in rows for field in run.TIMES)


def test_the_density_reached_is_the_one_asked_for(rows):
    for row in rows:
        if block := row.get("block"):  # rows of before there were blocks do not say so
            r, c = map(int, block.split("x"))
            short = row["density_asked"] - row["density"]
            assert -0.5 <= short * (784 * 256 + 256 * 10) < 2 * r * c  # less than one block a layer, of two
        elif row["pattern"] is None:
            assert abs(row["density"] - row["density_asked"]) <= 0.5 / (784 * 256 + 256 * 10)
        else:
            n, m = map(int, row["pattern"].split(":"))
            assert row["density"] == n / m


def test_the_fine_tunings_table_is_that_of_its_rows_and_its_thresholds_are_read_off_it(monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    steps = importlib.import_module("finetune")
    found = [json.loads(line) for line in steps.ROWS.read_text().splitlines()]
    text = (HERE / "README.md").read_text()
    assert text.split(steps.BEGIN)[1].split(steps.END)[0].strip() == steps.table(found)
    for row in found:
        masks = {"all": torch.arange(weights := weights_of(row["sizes"])) < round(row["density"] * weights)}
        if sparse_steps_pay(masks, row["batch"], torch.device("cpu")):
            assert row["ratio"] > 1
    assert sum(row["ratio"] > 1 for row in found) > 12


def weights_of(sizes):
    return sum(k * n for k, n in itertools.pairwise(sizes))


def test_the_pairs_and_wandas_table_are_those_of_the_rows(run, rows, monkeypatch):
    monkeypatch.syspath_prepend(str(HERE))
    wanda = importlib.import_module("wanda")
    found = [json.loads(line) for line in wanda.ROWS.read_text().splitlines()]
    text = (HERE / "README.md").read_text()
    assert text.split(run.PAIRS_BEGIN)[1].split(run.PAIRS_END)[0].strip() == run.pairs(rows)
    assert text.split(wanda.BEGIN)[1].split(wanda.END)[0].strip() == wanda.table(found)
