"""Lottery tickets, and the runs that begin anew: rewound, or sparse from the start."""

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import cli, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse.formats import from_csr
from qsparse.sparse.lottery import rewind
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

SIZES = (784, 16, 10)


def test_a_ticket_is_the_masked_beginning():
    initial = MLP(SIZES, seed=3)
    masks = {name: torch.rand_like(layer.weight) < 0.3 for name, layer in initial.layers().items()}
    ticket = rewind(initial, masks)
    for name, layer in ticket.layers().items():
        assert torch.equal(layer.weight, initial.layers()[name].weight * masks[name])
        assert torch.equal(layer.bias, initial.layers()[name].bias)
    assert (initial.fc1.weight != 0).all()


@pytest.mark.parametrize("masks", [{}, {"fc1": torch.ones(16, 784, dtype=torch.bool)}, {"fc1": torch.ones(2, 2)}])
def test_masks_of_other_layers_are_refused(masks):
    with pytest.raises(ValueError, match="masks must be of the layers fc1, fc2"):
        rewind(MLP(SIZES), masks)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))
    return train(TrainConfig(hidden=(16,), epochs=2, data="mnist-5k", device="cpu", seed=4)).run


@pytest.mark.parametrize("schedule", ["lottery", "rigl", "set"])
def test_a_schedule_that_begins_anew(run, schedule):
    options = ("--density", "0.2", "--schedule", schedule, "--epochs", "1", "--finetune-epochs", "1")
    result = CliRunner().invoke(cli.app, ["sparsify", str(run), *options, "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.stderr
    assert "epoch 2/2" in result.stderr
    value = json.loads(result.stdout)
    row = value["rows"][1]
    begun = "csr-0.2" if schedule == "lottery" else "csr-0.2-random-erk"
    assert value["variant"] == f"{begun}-{schedule}1-ft1"
    assert row["method"] == ("magnitude" if schedule == "lottery" else schedule)
    assert (row["schedule"], row["schedule_epochs"], row["gradual_epochs"]) == (schedule, 1, 0)
    model = qsparse.load(value["saved"])
    assert sum(layer.nnz for layer in model.layers().values()) == round(0.2 * (784 * 16 + 160))
    assert row["accuracy"] > 0.5


def test_the_ticket_is_the_magnitude_mask_of_the_run_on_its_first_weights(run):
    masked = qsparse.load(variants.sparsify_run(run, 0.2, device="cpu").directory)
    how = {"schedule": "lottery", "epochs": 1, "lr": 1e-7}  # so low that the weights stay where they began
    ticket = qsparse.load(variants.sparsify_run(run, 0.2, **how, device="cpu").directory)
    initial, trained = MLP(SIZES, seed=4), qsparse.load(run)
    for name, layer in ticket.layers().items():
        kept = masked.layers()[name]
        assert torch.equal(layer.col_indices, kept.col_indices)
        alive = from_csr(torch.ones_like(layer.values), layer.col_indices, layer.row_offsets, shape_of(layer)).bool()
        torch.testing.assert_close(layer.values, initial.layers()[name].weight.detach()[alive], rtol=0, atol=1e-4)
        assert (layer.values - trained.layers()[name].weight.detach()[alive]).abs().max() > 1e-2


def shape_of(layer):
    return layer.out_features, layer.in_features


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"schedule": "rigl", "epochs": 1, "pruner": "wanda"}, "rigl begins with random connections"),
        ({"schedule": "set"}, "--epochs is 0: it is of --schedule set, which needs at least 1"),
        ({"schedule": "lottery"}, "needs at least 1"),
        ({"schedule": "rigl", "epochs": 1, "block": "1x16"}, "moves single connections"),
        ({"schedule": "deepr", "epochs": 1}, "unknown schedule 'deepr'"),
    ],
)
def test_what_is_refused_before_anything_is_read(options, message):
    with pytest.raises(UserError, match=message):
        variants.sparsify_run("runs/1", 0.1, **options)
