import dataclasses
import itertools

import numpy as np
import pytest
import torch

import qsparse
from qsparse import data
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import (
    DISTRIBUTIONS,
    PRUNERS,
    EmptyLayerWarning,
    SparseConfig,
    magnitude_masks,
    prunable_weights,
    prune,
)
from qsparse.sparse.pruning import BiasWarning
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate, fit

SIZES = (784, 24, 10)
TOTAL = 784 * 24 + 24 * 10


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-5k")


@pytest.fixture(scope="module")
def trained(digits):
    model = MLP(SIZES)
    fit(model, digits, TrainConfig(epochs=3))
    return model


def kept(masks):
    return sum(int(mask.sum()) for mask in masks.values())


@pytest.mark.parametrize(("pruner", "distribution"), list(itertools.product(PRUNERS, DISTRIBUTIONS)))
def test_the_asked_density_is_reached_to_the_weight(digits, trained, pruner, distribution):
    before = {name: tensor.clone() for name, tensor in trained.state_dict().items()}
    config = SparseConfig(0.2, pruner, distribution, min_density=0.05, samples=256)
    pruned, masks = prune(trained, config, digits)
    assert kept(masks) == round(0.2 * TOTAL)
    for name, layer in pruned.layers().items():
        assert (layer.weight[~masks[name]] == 0).all()
        assert torch.equal(layer.bias, before[f"{name}.bias"])
        assert int(masks[name].sum()) >= 0.05 * masks[name].numel() - 1
        if pruner == "wanda":
            rows = masks[name].sum(dim=1)
            assert int(rows.max() - rows.min()) <= 1
        if pruner != "sparsegpt":
            assert torch.equal(layer.weight[masks[name]], before[f"{name}.weight"][masks[name]])
    assert all(torch.equal(trained.state_dict()[name], tensor) for name, tensor in before.items())


@pytest.mark.parametrize("pruner", PRUNERS)
@pytest.mark.parametrize("pattern", ["2:4", "1:4", "4:8"])
def test_patterns_hold_in_every_group(digits, trained, pruner, pattern):
    n, m = map(int, pattern.split(":"))
    _, masks = prune(trained, SparseConfig(pattern=pattern, pruner=pruner, samples=256), digits)
    for mask in masks.values():
        assert (mask.reshape(len(mask), -1, m).sum(dim=2) == n).all()


@pytest.mark.parametrize("config", [SparseConfig(0.2), SparseConfig(pattern="1:4", pruner="wanda"),
                                    SparseConfig(0.2, "sparsegpt"), SparseConfig(0.2, block="1x8")])  # fmt: skip
def test_corrected_biases_keep_the_mean_of_each_output(digits, trained, config):
    config = dataclasses.replace(config, correct_bias=True, samples=512)
    plain, masks = prune(trained, dataclasses.replace(config, correct_bias=False), digits)
    pruned, again = prune(trained, config, digits)
    assert torch.equal(masks["fc1"], again["fc1"])  # of the first layer, before which nothing was corrected
    assert torch.equal(plain.fc1.weight, pruned.fc1.weight)
    images, _ = next(iter(data.batches(digits.train, 512, seed=0, epoch=0)))
    x = data.normalize(images, torch.float32)
    with torch.no_grad():
        means = [(x @ model.fc1.weight.T + model.fc1.bias).mean(dim=0) for model in (trained, pruned, plain)]
        logits = [model(images).mean(dim=0) for model in (trained, pruned, plain)]
    for dense, corrected, left in (means, logits):  # the dense network's, also where the inputs are a pruned layer's
        torch.testing.assert_close(corrected, dense, rtol=1e-4, atol=1e-4)
        assert (left - dense).abs().max() > 0.01
    assert config.variant.endswith("samples512")
    assert "bias" in config.variant


def test_corrected_biases_stay_only_where_they_gain(digits, trained):
    config = SparseConfig(0.05, correct_bias=True, samples=512)
    left, masks = prune(trained, SparseConfig(0.05))
    with pytest.warns(BiasWarning, match=r"stay as they were: corrected, they would give \d\d\.\d\d% on the"):
        pruned, again = prune(trained, config, digits)
    assert torch.equal(masks["fc1"], again["fc1"])
    assert all(torch.equal(a, b) for a, b in zip(left.parameters(), pruned.parameters(), strict=True))


@pytest.mark.parametrize("density", [0.3, 0.1, 0.02])
@pytest.mark.parametrize("pruner", ["magnitude", "wanda"])
@pytest.mark.filterwarnings("ignore::qsparse.sparse.pruning.BiasWarning")
def test_correcting_biases_never_loses_on_the_validation_split(digits, trained, density, pruner):
    config = SparseConfig(density, pruner, samples=256)
    plain, corrected = (
        prune(trained, dataclasses.replace(config, correct_bias=given), digits)[0] for given in (False, True)
    )
    assert evaluate(corrected, digits.validation)[0] >= evaluate(plain, digits.validation)[0]


def test_correcting_biases_needs_images_and_a_validation_split(digits, trained):
    with pytest.raises(UserError, match="The correction of biases looks at training images"):
        prune(trained, SparseConfig(0.5, correct_bias=True))
    with pytest.raises(UserError, match="gain on the validation split, and there is none"):
        prune(trained, SparseConfig(0.5, correct_bias=True), data.load("mnist-5k", 0))


def test_the_defaults_are_the_masks_of_before(trained):
    _, masks = prune(trained, SparseConfig(0.1))
    expected = magnitude_masks(prunable_weights(trained), 0.1)
    assert all(torch.equal(masks[name], expected[name]) for name in expected)


@pytest.mark.parametrize("pruner", PRUNERS)
def test_one_seed_one_result(digits, trained, pruner):
    first, again = (prune(trained, SparseConfig(0.3, pruner, samples=128, seed=3), digits)[0] for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(first.parameters(), again.parameters(), strict=True))


def test_another_seed_takes_other_weights_at_random(trained):
    masks = [prune(trained, SparseConfig(0.3, "random", seed=seed))[1]["fc1"] for seed in (0, 1)]
    assert (masks[0] != masks[1]).any()


@pytest.mark.parametrize("pruner", ["wanda", "snip", "sparsegpt"])
def test_a_pruner_without_its_data_is_refused(trained, pruner):
    with pytest.raises(UserError, match=f"{pruner} looks at training images"):
        prune(trained, SparseConfig(0.5, pruner))


@pytest.mark.parametrize("pruner", ["wanda", "snip", "sparsegpt", "movement"])
def test_images_that_are_not_finite_make_no_mask(trained, pruner):
    images = torch.randn(70, 784)
    images[3, 5] = torch.nan
    with pytest.raises(ValueError, match="the images hold NaN or Inf"):
        prune(trained, SparseConfig(0.5, pruner), (images, torch.zeros(70, dtype=torch.int64)))


@pytest.mark.parametrize("pruner", ["snip", "movement"])
@pytest.mark.parametrize("label", [-1, 10])
def test_labels_beyond_the_classes_make_no_mask(digits, trained, pruner, label):
    images, labels = digits.train.images[:70], digits.train.labels[:70].clone()
    labels[3] = label
    with pytest.raises(ValueError, match="the labels must be from 0 to 9"):
        prune(trained, SparseConfig(0.5, pruner), (images, labels))


def test_an_emptied_layer_is_named_and_min_density_saves_it(trained):
    model = trained.replace({})
    with torch.no_grad():
        model.fc2.weight *= 1e-6
    with pytest.warns(EmptyLayerWarning, match=r"layer fc2 without any of its 240 weights.*--min-density"):
        prune(model, SparseConfig(0.1))
    _, masks = prune(model, SparseConfig(0.1, min_density=0.05))
    assert int(masks["fc2"].sum()) == 12
    assert kept(masks) == round(0.1 * TOTAL)


@pytest.mark.parametrize("pruner", PRUNERS)
def test_pruned_weights_stay_exactly_zero_under_momentum_and_weight_decay(digits, trained, pruner):
    pruned, masks = prune(trained, SparseConfig(0.1, pruner, samples=256), digits)
    before = pruned.fc1.weight.detach().clone()
    fit(pruned, digits, TrainConfig(epochs=1, momentum=0.9, weight_decay=1e-2, lr=0.05), masks=masks)
    for name, layer in pruned.layers().items():
        assert (layer.weight[~masks[name]] == 0).all()
    assert (pruned.fc1.weight != before).any()


def test_pruners_rank_as_they_should(digits, trained):
    def accuracy(*arguments, **fields):
        return evaluate(prune(trained, SparseConfig(*arguments, **fields), digits)[0], digits.test)[0]

    dense = evaluate(trained, digits.test)[0]
    assert accuracy(0.3, "random") < dense - 0.1
    assert accuracy(0.3, "sparsegpt", "erk") > accuracy(0.3, "random") + 0.1
    assert accuracy(pattern="1:4", pruner="sparsegpt") > accuracy(pattern="1:4") - 0.01
    assert accuracy(1.0, "wanda") == dense


def test_from_python(digits, trained):
    config = SparseConfig(0.2, "wanda", format="coo", samples=64)
    sparse = qsparse.sparsify(trained, config, digits)
    pruned, masks = prune(trained, config, digits)
    assert {layer.format for layer in sparse.layers().values()} == {"coo"}
    assert sum(layer.nnz for layer in sparse.layers().values()) == kept(masks)
    images = digits.test.images[:50]
    torch.testing.assert_close(sparse(images), pruned(images), rtol=1e-4, atol=1e-4)


def test_images_and_labels_will_do_as_data(digits, trained):
    config = SparseConfig(0.2, "snip", samples=64)
    images, labels = digits.train.images, digits.train.labels
    floats = data.normalize(images)
    expected = qsparse.sparsify(trained, config, digits)
    for pair in (digits.train, (images, labels), [images.numpy(), labels.numpy()], (floats, labels.int())):
        given = qsparse.sparsify(trained, config, pair)
        assert torch.equal(given.fc1.col_indices, expected.fc1.col_indices)
    for pruner in ("wanda", "sparsegpt"):
        config = SparseConfig(0.2, pruner, samples=64)
        assert torch.equal(prune(trained, config, (floats, labels))[1]["fc1"], prune(trained, config, digits)[1]["fc1"])


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        (
            torch.zeros(5, 784),
            TypeError,
            "images and labels must be a Split, .* or a pair of arrays, not Tensor",
        ),
        (np.zeros((5, 784)), TypeError, "images and labels must be a Split, .* not ndarray"),
        ((torch.zeros(5, 784), None), TypeError, "images and labels must be a Split, .* not tuple"),
        ((torch.zeros(5, 784), torch.zeros(5)), TypeError, r"labels whole numbers, not torch\.float32, torch\.float32"),
        ((torch.zeros(5, 784), torch.zeros(4).long()), ValueError, r"not \(5, 784\), \(4,\)"),
        ((torch.zeros(5, 28, 28), torch.zeros(5).long()), ValueError, r"not \(5, 28, 28\), \(5,\)"),
        ((torch.zeros(5, 20), torch.zeros(5).long()), ValueError, "the images have 20 pixels, and the model takes 784"),
        ((torch.zeros(0, 784), torch.zeros(0).long()), UserError, "wanda looks at training images"),
    ],
)
@pytest.mark.parametrize("call", [qsparse.sparsify, qsparse.compress])
def test_other_data_are_named(trained, given, error, message, call):
    with pytest.raises(error, match=message):
        call(trained, SparseConfig(0.2, "wanda"), given)


@pytest.mark.parametrize("config", [0.1, "magnitude", None])
def test_a_pruning_that_is_none_is_named(trained, config):
    with pytest.raises(TypeError, match=f"config must be a SparseConfig, such as .*, not {type(config).__name__}"):
        prune(trained, config)


def test_the_call_with_masks_keeps_working(trained):
    masks = magnitude_masks(prunable_weights(trained), 0.2)
    for sparse in (
        qsparse.sparsify(trained, masks, "coo"),
        qsparse.sparsify(trained, masks, format="coo"),
        qsparse.sparsify(model=trained, masks=masks, format="coo"),
    ):
        assert sparse.fc1.format == "coo"
    assert qsparse.sparsify(trained, masks).fc1.format == "csr"


def test_what_would_have_no_effect_is_refused(digits, trained):
    masks = magnitude_masks(prunable_weights(trained), 0.2)
    with pytest.raises(TypeError, match="masks choose the weights already"):
        qsparse.sparsify(trained, masks, digits)
    for format in ({"data": "coo"}, {"data": digits, "format": "coo"}):
        with pytest.raises(TypeError, match=r"names the format itself, as SparseConfig\(0.1, format='coo'\)"):
            qsparse.sparsify(trained, SparseConfig(0.2), **format)
