"""Blocks against a search over all of them, and what a layer too small for one is told."""

import pytest
import torch

from qsparse import data
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, prune
from qsparse.sparse.blocks import BlockWarning, block_means, largest_blocks
from qsparse.sparse.config import parse_block
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit
from qsparse.variants import sparsify_run

SIZES = (784, 24, 10)
TOTAL = 784 * 24 + 24 * 10


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-5k")


def blocks_of(array, r, c):
    return [array[i : i + r, j : j + c] for i in range(0, array.shape[0], r) for j in range(0, array.shape[1], c)]


@pytest.mark.parametrize("block", [(1, 16), (16, 16), (4, 2), (1, 1), (3, 5)], ids=str)
@pytest.mark.parametrize("shape", [(32, 48), (10, 24), (7, 33), (1, 1)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.3, 0.5, 1.0])
def test_the_best_whole_blocks_stay(block, shape, density):
    scores = torch.randn(shape, generator=torch.Generator().manual_seed(1))
    count = round(density * scores.numel())
    mask = largest_blocks(scores, count, block)
    kept = blocks_of(mask, *block)
    assert all(bool(each.all()) or not bool(each.any()) for each in kept)
    means = [float(each.mean()) for each in blocks_of(scores, *block)]
    stay = sorted((mean for mean, each in zip(means, kept, strict=True) if each.all()), reverse=True)
    assert stay == sorted(means, reverse=True)[: len(stay)]
    largest = min(block[0], shape[0]) * min(block[1], shape[1])
    assert count - largest < int(mask.sum()) <= count
    for spread, mean in zip(blocks_of(block_means(scores, block), *block), means, strict=True):
        torch.testing.assert_close(spread, torch.full_like(spread, mean), check_dtype=False)


def test_equal_blocks_keep_the_first():
    assert largest_blocks(torch.zeros(2, 4), 4, (1, 2)).tolist() == [[True] * 4, [False] * 4]


@pytest.mark.parametrize("pruner", ["magnitude", "random", "wanda", "snip", "movement"])
@pytest.mark.parametrize("distribution", ["global", "uniform", "erk"])
def test_every_pruner_of_scores_prunes_blocks(digits, pruner, distribution):
    config = SparseConfig(0.3, pruner, distribution, block="4x8", samples=128)
    _, masks = prune(MLP(SIZES), config, digits)
    kept = sum(int(mask.sum()) for mask in masks.values())
    assert round(0.3 * TOTAL) - 2 * 4 * 8 < kept <= round(0.3 * TOTAL)
    for mask in masks.values():
        assert all(bool(each.all()) or not bool(each.any()) for each in blocks_of(mask, 4, 8))


def test_a_layer_too_small_for_a_block_is_told_and_keeps_smaller_ones(digits):
    with pytest.warns(BlockWarning, match=r"Layer fc2 \(10 x 24\) is too small for a block of 16 x 16.*10 x 16"):
        pruned, masks = prune(MLP(SIZES), SparseConfig(0.5, block="16x16", distribution="uniform"))
    assert int(masks["fc2"].sum()) in (80, 160 - 80)
    fit(pruned, digits, TrainConfig(epochs=1, momentum=0.9, weight_decay=1e-2), masks=masks)
    assert all((layer.weight[~masks[name]] == 0).all() for name, layer in pruned.layers().items())


def test_the_row_and_the_name_say_the_block(tmp_path, monkeypatch):
    from qsparse.train.run import train

    monkeypatch.chdir(tmp_path)
    run = train(TrainConfig(hidden=(32,), epochs=1, data="mnist-5k", device="cpu")).run
    quick = {"batches": (1,), "budget_s": 0.001}
    done = sparsify_run(run, 0.2, block="1x16", pruner="movement", samples=256, device="cpu", measuring=quick)
    assert done.variant == "csr-0.2-1x16-movement-samples256"
    assert (done.rows[1]["block"], done.rows[1]["method"]) == ("1x16", "movement")


@pytest.mark.parametrize("text", ["", "16", "0x16", "1x0", "1x1025", "axb", "1x2x3", "-1x4", "1 x 4", "1x4\n"])
def test_rubbish_blocks_are_refused(text):
    with pytest.raises(UserError, match="RxC, rows by columns"):
        parse_block(text)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"pattern": "2:4", "block": "1x16"}, "A pattern is of single weights"),
        ({"density": 0.5, "block": "1x16", "pruner": "sparsegpt"}, "choose another pruner for blocks"),
    ],
)
def test_what_excludes_each_other(fields, message):
    with pytest.raises(UserError, match=message):
        SparseConfig(**fields)
