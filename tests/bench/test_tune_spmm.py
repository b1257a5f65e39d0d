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
