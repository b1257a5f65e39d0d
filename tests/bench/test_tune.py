import json
from dataclasses import dataclass, replace
from types import SimpleNamespace

import pytest
import torch

from qsparse.bench import gemm, harness, tune
from qsparse.errors import UserError
from qsparse.kernels._gemm_costs import Costs
from qsparse.kernels._gemm_single_sm90 import Single
from qsparse.kernels._gemm_sm90_configs import Config, label, labelled


@dataclass(frozen=True)
class Tile:
    tile: int


@pytest.fixture
def face(monkeypatch):
    """A face with three configurations: a wrong one, a slow one, and a fast one."""
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.02)

    def run(config, x, w, bias, relu):
        for _ in range(config.tile):
            y = x @ w.t()
        return y + 1 if config.tile == 1 else y

    return SimpleNamespace(candidates=lambda *problem: [Tile(1), Tile(100), Tile(2)], run=run)


def fastest(face, shape=(32, 16, 64)):
    environment = {"gpu": "Some GPU", "date": "now", "commit": None, "torch": "2", "cuda": "13"}
    return tune._fastest(face, shape, "float16", "nt", torch.device("cpu"), environment, 50)


def test_the_fastest_right_configuration_wins(face):
    entry = fastest(face)
    assert entry["config"] == {"tile": 2}
    assert (entry["gpu"], entry["dtype"], entry["layout"], entry["shape"]) == (
        "Some GPU",
        "float16",
        "nt",
        [32, 16, 64],
    )
    assert entry["wrong"] == 1
    assert entry["times"].keys() == {"2", "100"}
    assert 0 < entry["us"] == entry["times"]["2"] < entry["times"]["100"]


def test_the_shape_of_an_entry_is_that_of_the_product(face):
    environment = {"gpu": None, "date": None, "commit": None, "torch": None, "cuda": None}
    entry = tune._fastest(face, (32, 16, 64), "float16", "tn", torch.device("cpu"), environment, 50)
    assert entry["shape"] == [16, 64, 32]


def test_where_none_is_right_nothing_is_written(face):
    face.candidates = lambda *problem: [Tile(1)]
    with pytest.raises(gemm.UserError, match="none of 1"):
        fastest(face)


def entry_of(shape, us_of, *configs):
    times = {label(config): us_of(config, *shape) for config in configs}
    common = {"gpu": "Some GPU", "multiprocessors": 132, "dtype": "float16", "layout": "nt"}
    return {**common, "shape": list(shape), "times": times}


SIZES = [(m, n, k) for m in (8, 300, 5000) for n in (10, 1000) for k in (64, 1000)]


def test_the_costs_are_those_that_the_times_were_made_of():
    small, big = Single(64, 64, 1, 4, split=4), Config(128, 256, 2, 4, cm=2)
    costs = {small: Costs(3.5, 1.25, 0.5, 2.0, 0.125), big: Costs(4.0, 0.0, 0.25, 1.0, 0.5)}

    def us(config, m, n, k):
        slower = 1.25 if config == replace(big, group=16) else 1.0  # another walk of the same kernel
        return slower * costs[replace(config, group=8) if isinstance(config, Config) else config].us(
            config, m, n, 2 * k, 2, 132
        )

    entries = [entry_of(shape, us, small, big, replace(big, group=16)) for shape in SIZES]
    found = tune.fit([{"gpu": "Some GPU", "dtype": "float16", "shape": [1, 1, 1]}, *entries])  # one of older times
    assert {labelled(row["config"]): Costs(**row["costs"]) for row in found} == costs
    assert all((row["gpu"], row["dtype"], row["shapes"]) == ("Some GPU", "float16", len(SIZES)) for row in found)
    assert all(row["error"] < 1e-3 for row in found)
    assert tune.fit(entries[:5]) == []  # too few for five constants


def test_a_cost_is_never_below_zero():
    config = Single(64, 64, 1, 8)
    entries = [entry_of(shape, lambda config, m, n, k: 20 - k / 100, config) for shape in SIZES]
    (row,) = tune.fit(entries)
    assert min(row["costs"].values()) == 0 < max(row["costs"].values())
    assert row["error"] > 0.1


def test_an_entry_replaces_the_older_one_of_its_problem(tmp_path):
    table = tmp_path / "table.json"
    entry = {"gpu": "A", "dtype": "float16", "layout": "nt", "shape": [1, 2, 3], "us": 5.0}
    tune.write_entries(table, [entry, entry | {"gpu": "B"}])
    tune.write_entries(table, [entry | {"us": 4.0}])
    found = json.loads(table.read_text())
    assert [(each["gpu"], each["us"]) for each in found] == [("A", 4.0), ("B", 5.0)]
    assert len(table.read_text().splitlines()) == 4
    assert list(tmp_path.iterdir()) == [table]


@pytest.mark.parametrize("text", ["", '{"a": 1}\n{"b": 2}\n', '{"a": 1}', "[1]"])
def test_a_file_that_is_no_table_is_not_added_to(text, tmp_path):
    table = tmp_path / "rows.jsonl"
    table.write_text(text)
    with pytest.raises(UserError, match="is no tuning table"):
        tune.write_entries(table, [])
    assert table.read_text() == text
    assert tune.read_entries(tmp_path / "none.json") == []
