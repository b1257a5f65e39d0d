"""The table of ways: refused without a GPU, and on one every entry is one that the chooser reads."""

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli
from qsparse.bench import tune_spmm
from qsparse.errors import UserError
from qsparse.sparse import product


def test_a_cpu_is_not_tuned(tmp_path):
    with pytest.raises(UserError, match="runs on the CPU"):
        tune_spmm.tune(torch.device("cpu"), table=tmp_path / "table.json")
    result = CliRunner().invoke(cli.app, ["bench", "spmm", "--tune", "--device", "cpu"])
    assert result.exit_code != 0
    assert not (tmp_path / "table.json").exists()


@pytest.fixture
def as_if_on_a_card(monkeypatch):
    """The command on a CPU as on a card: it times the CPU's products, once, and says that a GPU of this name did."""
    environment = {"gpu": "Some GPU", "date": "now", "commit": "none", "torch": "2", "cuda": "13"}
    monkeypatch.setattr(tune_spmm, "environment", lambda device: environment)
    monkeypatch.setattr("qsparse.device.resolve_device", lambda name, say: torch.device("cuda", 0))
    times = tune_spmm._times
    monkeypatch.setattr(tune_spmm, "_times", lambda *cell: times(*cell[:-1], torch.device("cpu")))
    monkeypatch.setattr(tune_spmm, "_REPETITIONS", 1)


@pytest.mark.usefixtures("as_if_on_a_card")
def test_each_dtype_keeps_the_entries_of_the_other(tmp_path):
    table, command = tmp_path / "table.json", ["bench", "spmm", "--tune", "--device", "cuda", "--shapes", "8,64,256"]
    for options in (["float16", "0.1"], ["float32", "0.1"], ["float32", "0.3"], ["float32", "0.1"]):
        dtype, density = options
        arguments = [*command, "--dtype", dtype, "--density", density, "--out", str(table)]
        result = CliRunner().invoke(cli.app, arguments)
        assert result.exit_code == 0, result.output
    product.table.cache_clear()
    found = {(entry.dtype, entry.density): set(entry.us) for entry in product.table(table)}
    assert found == {
        ("float16", 0.1): set(product.WAYS),
        ("float32", 0.1): {"csr", "dense"},
        ("float32", 0.3): {"csr", "dense"},
    }
    assert len(product.table(table)) == len(found)


def test_the_table_of_the_package_is_one_that_the_chooser_reads():
    entries = product.table(product.TABLE)
    assert len({(entry.gpu, entry.dtype, entry.shape, entry.density) for entry in entries}) == len(entries) > 0


@pytest.mark.gpu
def test_entries_are_what_the_chooser_reads(tmp_path):
    table = tmp_path / "table.json"
    options = {"dtypes": ("float16", "float32"), "shapes": ((8, 64, 256),), "densities": (0.1,)}
    found = tune_spmm.tune(torch.device("cuda", 0), **options, table=table)
    again = tune_spmm.tune(torch.device("cuda", 0), **options, table=table)
    assert len(found.entries) == len(again.entries) == 2
    half, full = product.table(table)
    assert set(half.us) == set(product.WAYS)
    assert set(full.us) == {"csr", "dense"}
    assert half.shape == (8, 64, 256)
