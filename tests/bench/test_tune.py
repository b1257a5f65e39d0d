import json
from dataclasses import dataclass
from types import SimpleNamespace

import pytest
import torch

from qsparse.bench import gemm, harness, tune


@dataclass(frozen=True)
class Config:
    tile: int


@pytest.fixture
def face(monkeypatch):
    """A face with three configurations: a wrong one, a slow one, and a fast one."""
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.02)

    def run(config, x, w, bias, relu):
        for _ in range(config.tile):
            y = x @ w.t()
        return y + 1 if config.tile == 1 else y

    return SimpleNamespace(candidates=lambda *problem: [Config(1), Config(100), Config(2)], run=run)


def fastest(face, shape=(32, 16, 64)):
    environment = {"gpu": "Some GPU", "date": "now", "commit": None, "torch": "2", "cuda": "13"}
    return tune._fastest(face, shape, "float16", "nt", torch.device("cpu"), environment)


def test_the_fastest_right_configuration_wins(face):
    entry = fastest(face)
    assert entry["config"] == {"tile": 2}
    assert (entry["gpu"], entry["dtype"], entry["layout"], entry["shape"]) == (
        "Some GPU",
        "float16",
        "nt",
        [32, 16, 64],
    )
    assert (entry["tried"], entry["wrong"]) == (3, 1)
    assert entry["us"] > 0


def test_the_shape_of_an_entry_is_that_of_the_product(face):
    environment = {"gpu": None, "date": None, "commit": None, "torch": None, "cuda": None}
    entry = tune._fastest(face, (32, 16, 64), "float16", "tn", torch.device("cpu"), environment)
    assert entry["shape"] == [16, 64, 32]


def test_where_none_is_right_nothing_is_written(face):
    face.candidates = lambda *problem: [Config(1)]
    with pytest.raises(gemm.UserError, match="none of 1"):
        fastest(face)


def test_an_entry_replaces_the_older_one_of_its_problem(tmp_path):
    table = tmp_path / "table.json"
    entry = {"gpu": "A", "dtype": "float16", "layout": "nt", "shape": [1, 2, 3], "us": 5.0}
    tune.write_entries(table, [entry, entry | {"gpu": "B"}])
    tune.write_entries(table, [entry | {"us": 4.0}])
    found = json.loads(table.read_text())
    assert [(each["gpu"], each["us"]) for each in found] == [("A", 4.0), ("B", 5.0)]
    assert len(table.read_text().splitlines()) == 4
    assert list(tmp_path.iterdir()) == [table]
