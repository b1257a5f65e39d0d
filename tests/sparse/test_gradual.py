import pytest
import torch

from qsparse import data
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import SparseConfig
from qsparse.sparse.gradual import density_at, prune_gradually
from qsparse.train.config import TrainConfig

SIZES = (784, 16, 10)
TOTAL = 784 * 16 + 160


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-5k")


def test_the_density_falls_as_a_cube():
    assert density_at(0.1, 0.0) == 1.0
    assert density_at(0.1, 0.5) == pytest.approx(0.1 + 0.9 / 8)
    assert density_at(0.1, 1.0) == density_at(0.1, 1.5) == 0.1


@pytest.mark.parametrize("pruner", ["magnitude", "random", "wanda", "snip"])
def test_the_density_is_reached_and_holds(digits, pruner):
    seen = []

    def look(_):
        seen.append(sum(int((layer.weight != 0).sum()) for layer in model.layers().values()))

    model = MLP(SIZES)
    config = SparseConfig(0.1, pruner, samples=64)
    train = TrainConfig(epochs=3, momentum=0.9, weight_decay=1e-3, lr=0.02)
    masks = prune_gradually(model, config, digits, train, 2, progress=look)
    assert sum(int(mask.sum()) for mask in masks.values()) == round(0.1 * TOTAL)
    assert seen[0] > seen[len(seen) // 2] > seen[-1]
    for name, layer in model.layers().items():
        assert (layer.weight[~masks[name]] == 0).all()
    assert seen[-1] <= round(0.1 * TOTAL)  # in the epoch after the pruning, too


def test_without_epochs_after_it_the_end_is_masked_too(digits):
    model = MLP(SIZES)
    masks = prune_gradually(model, SparseConfig(0.05), digits, TrainConfig(epochs=1), 1)
    assert sum(int(mask.sum()) for mask in masks.values()) == round(0.05 * TOTAL)
    assert all((layer.weight[~masks[name]] == 0).all() for name, layer in model.layers().items())


def test_one_seed_one_result(digits):
    models = [MLP(SIZES), MLP(SIZES)]
    for model in models:
        prune_gradually(model, SparseConfig(0.1), digits, TrainConfig(epochs=1), 1)
    assert torch.equal(models[0].fc1.weight, models[1].fc1.weight)


def test_what_is_refused(digits):
    model = MLP(SIZES)
    with pytest.raises(UserError, match="pattern 2:4 has none on the way"):
        prune_gradually(model, SparseConfig(pattern="2:4"), digits, TrainConfig(), 1)
    with pytest.raises(UserError, match="sparsegpt makes new weights"):
        prune_gradually(model, SparseConfig(0.1, "sparsegpt"), digits, TrainConfig(), 1)
    for epochs in (0, 6):
        with pytest.raises(ValueError, match="from 1 to 5"):
            prune_gradually(model, SparseConfig(0.1), digits, TrainConfig(), epochs)
