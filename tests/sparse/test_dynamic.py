"""RigL and SET: what one move does, and that the density holds through all of them."""

import pytest
import torch

from qsparse import data
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, layer_counts
from qsparse.sparse.dynamic import fraction_at, move, train_dynamically
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate

SIZES = (784, 16, 10)
TOTAL = 784 * 16 + 160


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-5k")


def test_the_fraction_falls_as_a_cosine():
    assert fraction_at(0.0) == 0.3
    assert fraction_at(0.375) == pytest.approx(0.15)
    assert fraction_at(0.75) == fraction_at(1.0) == 0.0


def test_the_least_go_and_the_largest_gradients_come():
    w = torch.tensor([[5.0, -1.0, 0.0], [0.5, 0.0, 0.0]])
    mask = torch.tensor([[True, True, False], [True, False, False]])
    growth = torch.tensor([[9.0, 9.0, 1.0], [2.0, 3.0, 0.0]])
    moved, stayed = move(w, mask, growth, 1)
    assert stayed.tolist() == [[True, True, False], [False, False, False]]
    assert moved.tolist() == [[True, True, False], [False, True, False]]
    assert torch.equal(move(w, mask, growth, 0)[0], mask)


@pytest.mark.parametrize("count", [0, 1, 7, 30])
@pytest.mark.parametrize("density", [0.1, 0.9, 1.0])
def test_a_move_keeps_the_number_exactly(count, density):
    generator = torch.Generator().manual_seed(3)
    mask = torch.rand(12, 30, generator=generator) <= density
    w = torch.randn(12, 30, generator=generator) * mask
    moved, stayed = move(w, mask, torch.rand(12, 30, generator=generator), min(count, int(mask.sum())))
    assert int(moved.sum()) == int(mask.sum())
    assert int((mask & ~stayed).sum()) == min(count, int(mask.sum()))
    assert not bool((stayed & ~mask).any())


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_the_density_holds_at_every_look_and_the_mask_holds_exactly(digits, method):
    model, seen = MLP(SIZES), []
    config = SparseConfig(0.1, "random", "erk", samples=256)
    counts = layer_counts({name: layer.weight for name, layer in model.layers().items()}, 0.1, "erk")
    before = model.fc1.bias.detach().clone()

    def look(_):
        seen.append({name: layer.weight != 0 for name, layer in model.layers().items()})

    train = TrainConfig(epochs=3, momentum=0.9, weight_decay=1e-3, lr=0.02)
    masks = train_dynamically(model, config, digits, train, 2, method, progress=look)
    assert {name: int(mask.sum()) for name, mask in masks.items()} == counts
    assert sum(counts.values()) == round(0.1 * TOTAL)
    for alive in seen:
        assert all(int(each.sum()) <= counts[name] for name, each in alive.items())
    for name, layer in model.layers().items():
        assert (layer.weight[~masks[name]] == 0).all()
        assert (layer.weight[masks[name]] != 0).float().mean() > 0.9
    assert bool((seen[0]["fc1"] & ~masks["fc1"]).any())  # some connections went
    assert torch.equal(seen[-1]["fc1"], seen[-2]["fc1"])  # and from T_end on none
    assert (model.fc1.bias != before).any()
    assert evaluate(model, digits.test)[0] > 0.6


def test_rigl_wakes_pixels_with_a_gradient_and_set_any(digits):
    dead = (digits.train.images == digits.train.images[0]).all(dim=0)  # pixels that are always black
    assert int(dead.sum()) > 20
    share = {}
    for method in ("rigl", "set"):
        config = SparseConfig(0.05, "random", "erk", samples=512)
        masks = train_dynamically(MLP(SIZES), config, digits, TrainConfig(epochs=2), 2, method)
        share[method] = float(masks["fc1"].sum(dim=0)[dead].float().mean() / masks["fc1"].sum(dim=0).float().mean())
    assert share["rigl"] < 1.05
    assert share["set"] > 0.5


@pytest.mark.parametrize("method", ["rigl", "set"])
def test_one_seed_one_result(digits, method):
    models = [MLP(SIZES), MLP(SIZES)]
    for model in models:
        config = SparseConfig(0.1, "random", samples=128)
        train_dynamically(model, config, digits, TrainConfig(epochs=1), 1, method)
    assert torch.equal(models[0].fc1.weight, models[1].fc1.weight)


def test_what_is_refused(digits):
    for fields in ({"pattern": "2:4"}, {"density": 0.1, "block": "1x16"}):
        with pytest.raises(UserError, match="rigl moves single connections"):
            train_dynamically(MLP(SIZES), SparseConfig(**fields), digits, TrainConfig(), 1, "rigl")
    with pytest.raises(UserError, match="unknown method 'deepr': choose one of rigl, set"):
        train_dynamically(MLP(SIZES), SparseConfig(0.1), digits, TrainConfig(), 1, "deepr")
    with pytest.raises(ValueError, match="from 1 to 5"):
        train_dynamically(MLP(SIZES), SparseConfig(0.1), digits, TrainConfig(), 6, "set")
