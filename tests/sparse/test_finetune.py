"""Fine-tuning through CSR is the descent that it is through dense matrices, and is taken by sizes alone."""

import itertools
import json

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli, data, load
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, prune
from qsparse.sparse import finetune as room
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit
from qsparse.train.run import train


@pytest.fixture
def everywhere(monkeypatch):
    monkeypatch.setattr(room, "LEAST_WEIGHTS", 1)


def masks_of(density, sizes):
    masks = {f"fc{i + 1}": torch.zeros(n, k, dtype=torch.bool) for i, (k, n) in enumerate(itertools.pairwise(sizes))}
    for mask in masks.values():
        mask.view(-1)[: round(density * mask.numel())] = True
    return masks


@pytest.mark.parametrize(
    ("sizes", "density", "batch", "device", "pays"),
    [
        ((784, 1024, 10), 0.02, 64, "cpu", True),
        ((784, 1024, 1024, 10), 0.01, 16, "cpu", True),
        ((784, 1024, 10), 0.021, 64, "cpu", False),
        ((784, 1024, 10), 0.02, 65, "cpu", False),
        ((784, 256, 10), 0.01, 64, "cpu", False),
        ((784, 1024, 10), 0.01, 64, "cuda", False),
    ],
)
def test_sizes_say_which_steps_are_taken(sizes, density, batch, device, pays):
    assert room.sparse_steps_pay(masks_of(density, sizes), batch, torch.device(device)) == pays


@pytest.mark.parametrize(("backend", "sparse"), [("auto", True), ("torch", True), ("numpy", False)])
def test_a_backend_that_is_named_takes_the_steps(everywhere, backend, sparse):
    model, masks = prune(MLP((784, 16, 10)), SparseConfig(0.02, distribution="uniform"))
    assert room.finetune(model, masks, data.load("mnist-5k"), TrainConfig(epochs=1, backend=backend)) == sparse


@pytest.mark.parametrize("config", [TrainConfig(epochs=1, momentum=0.9, weight_decay=1e-3, lr=0.02),
                                    TrainConfig(epochs=2, batch_size=32)])  # fmt: skip
def test_it_is_the_same_descent(everywhere, config):
    digits = data.load("mnist-5k")
    model = MLP((784, 32, 10))
    fit(model, digits, TrainConfig(epochs=1))
    pruned, masks = prune(model, SparseConfig(0.02, distribution="erk"))
    dense, sparse = pruned.replace({}), pruned.replace({})
    expected = fit(dense, digits, config, masks=masks)
    seen = []
    assert room.finetune(sparse, masks, digits, config, on_epoch=lambda end: seen.append(end.metrics[-1]["loss"]))
    assert seen == pytest.approx([each["loss"] for each in expected], rel=1e-3)
    for (name, layer), other in zip(sparse.layers().items(), dense.layers().values(), strict=True):
        assert (layer.weight[~masks[name]] == 0).all()
        torch.testing.assert_close(layer.weight, other.weight, rtol=1e-2, atol=1e-3)
        torch.testing.assert_close(layer.bias, other.bias, rtol=1e-2, atol=1e-3)
        assert (layer.weight[masks[name]] != pruned.layers()[name].weight[masks[name]]).float().mean() > 0.5


def test_a_layer_that_keeps_nothing_trains_its_bias(everywhere):
    digits, model = data.load("mnist-5k"), MLP((784, 8, 10))
    masks = {name: torch.zeros_like(layer.weight, dtype=torch.bool) for name, layer in model.layers().items()}
    before = model.fc2.bias.detach().clone()
    assert room.finetune(model, masks, digits, TrainConfig(epochs=1))
    assert not model.fc1.weight.any()
    assert (model.fc2.bias != before).all()


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"model": torch.nn.Linear(20, 4)}, "model must be a qsparse.models.MLP, .* got Linear"),
        ({"masks": None}, "masks must be a SparseConfig, or a dict .* not NoneType"),
        ({"masks": {"fc1": torch.ones(4, 20)}}, "mask of layer fc1 must be bool"),
        ({"dataset": (torch.zeros(8, 20), torch.zeros(8))}, "data must be a Dataset, .* not tuple"),
    ],
)
def test_what_is_no_model_mask_or_data_set_is_named(given, message):
    split = data.Split(torch.zeros(8, 20), torch.zeros(8, dtype=torch.long))
    masks = {"fc1": torch.ones(4, 20, dtype=torch.bool)}
    fine = {"model": MLP((20, 4)), "masks": masks, "dataset": data.Dataset("custom", "", split, split, split)}
    with pytest.raises(TypeError, match=message):
        room.finetune(**{**fine, **given}, config=TrainConfig(hidden=(), epochs=1))


def test_a_row_says_which_steps_were_taken(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(TrainConfig(hidden=(700,), epochs=1, data="mnist-5k", device="cpu"))
    rows = {}
    for density in ("0.02", "0.1"):
        line = ["sparsify", "--density", density, "--finetune-epochs", "1", "--device", "cpu", "--json"]
        result = CliRunner().invoke(cli.app, line)
        assert result.exit_code == 0, result.stderr
        value = json.loads(result.stdout)
        rows[density] = value["rows"][1]["finetune_steps"]
        assert sum(layer.nnz for layer in load(value["saved"]).layers().values()) == round(
            float(density) * (784 * 700 + 7000)
        )
    assert rows == {"0.02": "sparse", "0.1": "dense"}
