"""The search for an order of columns, against all orders where they can be counted."""

import itertools

import pytest
import torch

from qsparse import data
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, prune
from qsparse.sparse.masks import largest_of_each_group
from qsparse.sparse.permutation import best_permutation, permuted_mask
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).abs()


def kept(scores, mask):
    return float(scores.double()[mask].sum())


def best_of_all(scores, n, m):
    orders = itertools.permutations(range(scores.shape[1]))
    return max(kept(scores, permuted_mask(scores, n, m, torch.tensor(order))) for order in orders)


@pytest.mark.parametrize("seed", range(4))
def test_a_small_matrix_comes_near_the_best_of_all_orders(seed):
    scores = normal(3, 6, seed=seed)
    plain, best = kept(scores, largest_of_each_group(scores, 1, 3)), best_of_all(scores, 1, 3)
    found = kept(scores, permuted_mask(scores, 1, 3, best_permutation(scores, 1, 3)))
    assert plain <= found <= best * (1 + 1e-12)
    assert found >= best * 0.97


def test_columns_that_matter_are_spread():
    scores = torch.full((5, 16), 0.1)
    scores[:, :8] = 10.0  # two groups of four hold them all
    order = best_permutation(scores, 2, 4)
    assert kept(scores, largest_of_each_group(scores, 2, 4)) == pytest.approx(5 * (4 * 10 + 4 * 0.1), rel=1e-6)
    assert kept(scores, permuted_mask(scores, 2, 4, order)) == pytest.approx(5 * 8 * 10, rel=1e-6)


@pytest.mark.parametrize(("n", "m"), [(2, 4), (1, 4), (4, 8)])
@pytest.mark.parametrize("k", [1, 3, 8, 37, 64])
@pytest.mark.parametrize("signed", [True, False])
def test_it_is_a_permutation_that_is_never_worse_and_the_pattern_holds_in_it(n, m, k, signed):
    scores = normal(9, k) - (0.5 if signed else 0)
    order = best_permutation(scores, n, m, seed=1)
    assert sorted(order.tolist()) == list(range(k))
    mask = permuted_mask(scores, n, m, order)
    groups = mask[:, order][:, : k // m * m].reshape(9, -1, m).sum(dim=2)
    assert (groups == n).all()
    plain = largest_of_each_group(scores, n, m)
    assert int(mask.sum()) == int(plain.sum())
    assert kept(scores, mask) >= kept(scores, plain) - 1e-9
    assert torch.equal(order, best_permutation(scores, n, m, seed=1))


@pytest.mark.parametrize("pruner", ["magnitude", "wanda"])
def test_pruning_in_the_best_order_keeps_more_and_holds_through_training(pruner):
    digits, model = data.load("mnist-5k"), MLP((784, 16, 10))
    masks = {p: prune(model, SparseConfig(pattern="2:4", permute=p, pruner=pruner, samples=64), digits) for p in
             (False, True)}  # fmt: skip
    for name, layer in model.layers().items():
        plain, permuted = (masks[p][1][name] for p in (False, True))
        assert int(plain.sum()) == int(permuted.sum()) == layer.weight.numel() // 2
        assert (permuted != plain).any()
    if pruner == "magnitude":
        sums = [float(masks[p][0].fc1.weight.detach().abs().sum()) for p in (False, True)]
        assert sums[1] > 1.02 * sums[0]
    pruned, chosen = masks[True]
    fit(pruned, digits, TrainConfig(epochs=1, momentum=0.9, weight_decay=1e-2, lr=0.05), masks=chosen)
    assert all((layer.weight[~chosen[name]] == 0).all() for name, layer in pruned.layers().items())


def test_the_name_says_it_and_what_it_is_not_for_is_refused():
    assert SparseConfig(pattern="2:4", permute=True).variant == "csr-2of4-permuted"
    for fields in ({"density": 0.5}, {"pattern": "2:4", "pruner": "sparsegpt"}):
        with pytest.raises(UserError, match="--permute orders the columns for an N:M pattern"):
            SparseConfig(**fields, permute=True)
