"""The format that costs least, in bytes or in time."""

import pytest
import torch

from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, choose_formats, prunable_weights, prune, sparsify_as
from qsparse.sparse.config import STORED
from qsparse.sparse.masks import largest, largest_of_each_group

SIZES = (784, 64, 10)


def masks_of(model, density):
    weights = prunable_weights(model)
    if density == "2:4":
        return {name: largest_of_each_group(w.abs(), 2, 4) for name, w in weights.items()}
    return {name: largest(w.abs(), round(density * w.numel())) for name, w in weights.items()}


def bytes_of(model):
    return sum(tensor.numel() * tensor.element_size() for tensor in model.state_dict().values())


@pytest.mark.parametrize("dtype", [None, "fp32", "fp16", "int8"])
@pytest.mark.parametrize("density", [0.02, 0.3, "2:4", 0.9, 1.0])
def test_by_bytes_no_format_takes_fewer(density, dtype):
    model = MLP(SIZES)
    masks = masks_of(model, density)
    formats, costs = choose_formats(model, masks, dtype)
    chosen = sparsify_as(SparseConfig(0.5, format="auto", dtype=dtype), model, masks)[0]
    for name, layer in chosen.layers().items():
        assert ("2:4" in costs[name]) == _is_24(masks[name])
        assert bytes_of(layer) == min(costs[name].values()) == costs[name][formats[name]]
        assert getattr(layer, "format", "dense") == formats[name]
        assert set(costs[name]) <= {"dense", *STORED}


def _is_24(mask):
    return int(mask.reshape(len(mask), -1, 4).sum(2).max()) <= 2


def test_what_is_chosen_at_which_density():
    model = MLP(SIZES)
    found = {
        density: choose_formats(model, masks_of(model, density), "fp32")[0]["fc1"]
        for density in (0.01, 0.1, "2:4", 1.0)
    }
    assert found == {0.01: "csr", 0.1: "bitmap", "2:4": "2:4", 1.0: "dense"}


def test_by_time_the_median_of_each_is_kept_and_the_least_is_taken():
    model = MLP(SIZES)
    config = SparseConfig(pattern="2:4", format="auto", auto="time", auto_batch=8)
    pruned, masks = prune(model, config)
    stored, costs = sparsify_as(config, pruned, masks)
    for name, layer in stored.layers().items():
        assert set(costs[name]) == {*STORED, "dense"}
        assert all(cost > 0 for cost in costs[name].values())
        assert getattr(layer, "format", "dense") == min(costs[name], key=costs[name].get)
    assert torch.isfinite(stored(torch.randn(3, 784))).all()


@pytest.mark.gpu
def test_by_time_on_a_gpu():
    model = MLP((784, 1024, 10)).cuda()
    config = SparseConfig(pattern="2:4", format="auto", auto="time", auto_batch=4096)
    stored, costs = sparsify_as(config, *prune(model, config))
    assert all(set(each) == {*STORED, "dense"} for each in costs.values())
    assert torch.isfinite(stored(torch.randn(3, 784, device="cuda"))).all()


def test_mixed_formats_are_one_row(tmp_path):
    from qsparse import checkpoint, data

    model = MLP(SIZES)
    masks = masks_of(model, 0.1) | {"fc2": torch.ones(10, 64, dtype=torch.bool)}
    mixed, _ = sparsify_as(SparseConfig(0.1, format="auto", dtype="fp32"), model, masks)
    checkpoint.save_model(tmp_path / "auto", mixed, {"variant": "auto"})
    again = checkpoint.load(tmp_path / "auto")
    row = measure({"baseline": model, "auto": again}, data.load("mnist-5k").test, budget_s=0.002, batches=(1,))[1]
    assert (row["format"], row["dtype"]) == ("bitmap+dense", "float32")
    assert row["density"] == (round(0.1 * 784 * 64) + 640) / (784 * 64 + 640)
    assert row["weight_bytes"] == bytes_of(mixed)


def test_what_is_refused():
    model = MLP(SIZES)
    with pytest.raises(UserError, match="unknown criterion 'size': choose one of bytes, time"):
        choose_formats(model, masks_of(model, 0.1), by="size")
    with pytest.raises(ValueError, match="name the layers fc1, fc2, not fc1"):
        choose_formats(model, {"fc1": masks_of(model, 0.1)["fc1"]})
