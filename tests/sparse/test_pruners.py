"""Each pruner against its formula in plain NumPy, and against a search where there is none."""

import itertools

import numpy as np
import pytest
import torch

from qsparse import data
from qsparse.models import MLP
from qsparse.sparse.masks import largest, largest_of_each_group, largest_of_each_row
from qsparse.sparse.random_scores import random_scores
from qsparse.sparse.snip import snip_scores
from qsparse.sparse.sparsegpt import sparsegpt, sparsegpt_scores
from qsparse.sparse.wanda import wanda_scores


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


# Masks from scores


@pytest.mark.parametrize("count", [0, 1, 7, 23, 24])
def test_equal_scores_keep_the_exact_count_from_the_front(count):
    assert largest(torch.ones(4, 6), count).flatten().tolist() == [True] * count + [False] * (24 - count)


@pytest.mark.parametrize("count", [0, 1, 5, 12, 23, 24])
def test_rows_share_the_count_to_one(count):
    scores = normal(4, 6)
    mask = largest_of_each_row(scores, count)
    per_row = mask.sum(dim=1)
    assert int(mask.sum()) == count
    assert int(per_row.max() - per_row.min()) <= 1
    for row in range(4):
        kept = scores[row][mask[row]]
        assert set(kept.tolist()) == set(scores[row].sort(descending=True).values[: len(kept)].tolist())


def test_rows_refuse_an_impossible_count():
    with pytest.raises(ValueError, match="from 0 to 24"):
        largest_of_each_row(normal(4, 6), 25)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8), (1, 2)])
@pytest.mark.parametrize("k", [1, 3, 8, 13, 784])
def test_groups_keep_the_n_largest(n, m, k):
    scores = normal(3, k)
    mask = largest_of_each_group(scores, n, m)
    assert mask.shape == scores.shape
    for row, start in itertools.product(range(3), range(0, k, m)):
        group = scores[row, start : start + m]
        kept = group[mask[row, start : start + m]]
        assert sorted(kept.tolist()) == sorted(group.tolist())[-n:]


def test_equal_scores_in_a_group_keep_the_first():
    assert largest_of_each_group(torch.zeros(1, 6), 2, 4).tolist() == [[True, True, False, False, True, True]]


# Scores


def test_random_scores_are_those_of_the_seed():
    weights = {"fc1": normal(3, 4), "fc2": normal(2, 3)}
    first, again, other = (random_scores(weights, seed) for seed in (1, 1, 2))
    assert all(torch.equal(first[name], again[name]) for name in weights)
    assert not torch.equal(first["fc1"], other["fc1"])
    assert {name: score.shape for name, score in first.items()} == {name: w.shape for name, w in weights.items()}


def test_wanda_scores_are_the_formula():
    w, x = normal(5, 7), normal(11, 7, seed=1)
    expected = np.abs(w.numpy().astype(np.float64)) * np.sqrt((x.numpy().astype(np.float64) ** 2).sum(axis=0))
    np.testing.assert_allclose(wanda_scores(w, x).numpy(), expected, rtol=1e-5)


def test_snip_scores_are_what_the_loss_changes_with_a_factor_on_the_weight():
    model = MLP((6, 5, 3), seed=2).double()
    images, labels = normal(9, 6).double(), torch.arange(9) % 3
    scores = snip_scores(model, images, labels)

    def loss(name, i, j, factor):
        y = images
        for other, layer in model.layers().items():
            w = layer.weight.detach().clone()
            if other == name:
                w[i, j] *= factor
            y = y @ w.T + layer.bias.detach()
            y = y.relu() if other == "fc1" else y
        return torch.nn.functional.cross_entropy(y, labels).item()

    step = 1e-5
    for name, i, j in (("fc1", 0, 0), ("fc1", 4, 5), ("fc1", 2, 3), ("fc2", 0, 0), ("fc2", 2, 4)):
        derivative = (loss(name, i, j, 1 + step) - loss(name, i, j, 1 - step)) / (2 * step)
        assert scores[name][i, j].item() == pytest.approx(abs(derivative), rel=1e-4, abs=1e-7)
    assert all(parameter.grad is None for parameter in model.parameters())


# SparseGPT


def loss(w, new, x):
    """||X W^T - X W'^T||^2, damped as the pruner damps it."""
    difference = (w - new).double()
    H = x.double().T @ x.double()
    H += 0.01 * H.diagonal().mean() * torch.eye(len(H))
    return torch.einsum("nk,kl,nl->", difference, H, difference).item()


def best_answer(w, mask, x):
    """The weights of the least loss that are zero where `mask` is False: row by row a least-squares problem."""
    H = x.double().T @ x.double()
    H += 0.01 * H.diagonal().mean() * torch.eye(len(H))
    new = torch.zeros_like(w, dtype=torch.float64)
    for i, stays in enumerate(mask):
        new[i, stays] = torch.linalg.solve(H[stays][:, stays], (H @ w[i].double())[stays])
    return new


@pytest.mark.parametrize("count", [0, 1, 37, 100, 299, 300])
def test_sparsegpt_keeps_the_count_and_writes_zeros(count):
    w, x = normal(20, 15), normal(50, 15, seed=1)
    before = w.clone()
    new, mask = sparsegpt(w, x, count)
    assert torch.equal(w, before)
    assert int(mask.sum()) == count
    assert (new[~mask] == 0).all()
    assert new.dtype == w.dtype


def test_sparsegpt_without_pruning_changes_nothing():
    w, x = normal(6, 9), normal(30, 9, seed=1)
    assert torch.equal(sparsegpt(w, x, w.numel())[0], w)


def test_one_pruned_weight_is_answered_as_well_as_can_be():
    w, x = normal(1, 6), normal(40, 6, seed=1)
    w[0, 0] = 1e-3  # of one block the first column: all the others answer
    new, mask = sparsegpt(w, x, 5)
    assert mask.tolist() == [[False, True, True, True, True, True]]
    torch.testing.assert_close(new.double(), best_answer(w, mask, x), rtol=1e-5, atol=1e-6)


def test_sparsegpt_loses_less_than_magnitude_and_not_less_than_possible():
    basis, w = normal(8, 40, seed=2), normal(30, 40)
    x = normal(200, 8, seed=1) @ basis + 0.1 * normal(200, 40, seed=3)  # inputs that say much the same
    new, mask = sparsegpt(w, x, 600)
    plain = largest(w.abs(), 600)
    assert loss(w, best_answer(w, mask, x), x) <= loss(w, new.double(), x) < 0.5 * loss(w, w * plain, x)


@pytest.mark.parametrize("k", [784, 131, 5])
def test_sparsegpt_patterns_hold_over_blocks(k):
    w, x = normal(4, k), normal(64, k, seed=1)
    new, mask = sparsegpt(w, x, pattern=(2, 4))
    for start in range(0, k, 4):
        width = min(4, k - start)
        assert (mask[:, start : start + 4].sum(dim=1) == min(2, width)).all()
    assert (new[~mask] == 0).all()


def test_blocks_do_what_one_block_does(monkeypatch):
    w, x = normal(6, 64), normal(100, 64, seed=1)
    whole = sparsegpt(w, x, pattern=(1, 4))
    monkeypatch.setattr("qsparse.sparse.sparsegpt.BLOCK", 8)
    parts = sparsegpt(w, x, pattern=(1, 4))
    assert torch.equal(whole[1], parts[1])
    torch.testing.assert_close(whole[0], parts[0], rtol=1e-5, atol=1e-6)


def test_inputs_that_are_always_zero_go_first():
    w, x = normal(3, 8) + 5, normal(30, 8, seed=1)
    x[:, [2, 5]] = 0
    _, mask = sparsegpt(w, x, 18)
    assert not mask[:, [2, 5]].any()
    new, mask = sparsegpt(w, torch.zeros(4, 8), 10)
    assert torch.isfinite(new).all()
    assert int(mask.sum()) == 10


def test_the_cost_of_a_weight_alone_is_its_loss():
    w, x = normal(2, 6), normal(40, 6, seed=1)
    scores = sparsegpt_scores(w, x)
    mask = torch.ones(2, 6, dtype=torch.bool)
    mask[1, 3] = False
    assert scores[1, 3].item() == pytest.approx(loss(w, best_answer(w, mask, x), x), rel=1e-6)


def test_sparsegpt_refuses_what_is_no_count():
    w, x = normal(2, 4), normal(5, 4)
    for arguments in ({}, {"count": 9}, {"count": -1}, {"count": 2, "pattern": (2, 4)}):
        with pytest.raises(ValueError, match="from 0 to 8"):
            sparsegpt(w, x, **arguments)


@pytest.fixture
def digits():
    return data.load("mnist-5k")


def test_calibration_images_are_of_the_training_split(digits):
    from qsparse.sparse import SparseConfig, prune

    seen = []
    empty = data.Split(digits.test.images[:0], digits.test.labels[:0])
    only_train = data.Dataset("custom", "", digits.train, empty, empty)
    model = MLP((784, 16, 10))
    for pruner in ("wanda", "snip", "sparsegpt"):
        config = SparseConfig(0.3, pruner, samples=64)
        seen.append([prune(model, config, dataset)[1] for dataset in (digits, only_train)])
    for first, second in seen:
        assert all(torch.equal(first[name], second[name]) for name in first)
