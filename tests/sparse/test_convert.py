import math

import pytest
import torch

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import SparseLinear
from qsparse.quant import quantize
from qsparse.sparse import FORMATS, magnitude_masks, prunable_weights, sparsify


def pruned(model, masks):
    """The dense model with zeros where the masks are False."""
    expected = model.replace({})
    with torch.no_grad():
        for name, layer in expected.layers().items():
            layer.weight *= masks[name]
    return expected


@pytest.mark.parametrize("format", FORMATS)
@pytest.mark.parametrize("density", [0.3, 0.5, 1.0])
def test_a_sparse_model_computes_what_the_pruned_dense_one_does(format, density):
    model = MLP((20, 30, 7), seed=1)
    masks = magnitude_masks(prunable_weights(model), density)
    sparse = sparsify(model, masks, format)
    x = torch.randn(9, 20)
    torch.testing.assert_close(sparse(x), pruned(model, masks)(x), rtol=1e-5, atol=1e-6)
    assert sum(layer.nnz for layer in sparse.layers().values()) == round(density * (20 * 30 + 30 * 7))
    assert {layer.format for layer in sparse.layers().values()} == {format}


@pytest.mark.parametrize("format", FORMATS)
def test_biases_stay_whole_and_nothing_is_shared(format):
    model = MLP((4, 3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masks = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in prunable_weights(model).items()}
    sparse = sparsify(model, masks, format)
    for name, layer in sparse.layers().items():
        assert isinstance(layer, SparseLinear)
        assert layer.nnz == 0
        assert torch.equal(layer.bias, before[f"{name}.bias"])
        layer.bias.fill_(7)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(sparse(torch.randn(3, 4)), torch.full((3, 2), 7.0))


def test_an_unknown_format_lists_the_valid_ones():
    model = MLP((4, 3, 2))
    with pytest.raises(UserError, match=r"'bsr'; the valid ones are csr, coo"):
        sparsify(model, magnitude_masks(prunable_weights(model), 0.5), "bsr")


@pytest.mark.parametrize("compress", [lambda m: quantize(m, "int8"), lambda m: sparsify(m, full_masks(m), "csr")])
def test_what_is_compressed_already_is_refused(compress):
    with pytest.raises(UserError, match="Cannot sparsify this model: its layer fc1 is already compressed"):
        prunable_weights(compress(MLP((4, 3, 2))))


def full_masks(model):
    return magnitude_masks(prunable_weights(model), 1.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_weights_that_are_not_finite_are_refused_naming_the_layer(value):
    model = MLP((4, 3, 2))
    masks = full_masks(model)
    with torch.no_grad():
        model.fc2.weight[1, 2] = value
    with pytest.raises(UserError, match="weight of layer fc2 holds 1 values that are NaN or Inf"):
        prunable_weights(model)
    with pytest.raises(UserError, match="layer fc2"):
        sparsify(model, masks)


def test_masks_must_fit_the_layers():
    model = MLP((4, 3, 2))
    masks = full_masks(model)
    with pytest.raises(ValueError, match="name the layers fc1, fc2, not fc1"):
        sparsify(model, {"fc1": masks["fc1"]})
    with pytest.raises(ValueError, match="one shape"):
        sparsify(model, {"fc1": masks["fc1"], "fc2": masks["fc1"]})
    with pytest.raises(TypeError, match="bool"):
        sparsify(model, {name: mask.float() for name, mask in masks.items()})


def test_a_half_precision_model_can_be_sparsified():
    model = quantize(MLP((20, 30, 7)), "bf16")
    masks = magnitude_masks(prunable_weights(model), 0.5)
    sparse = sparsify(model, masks, "csr")
    assert sparse.fc1.values.dtype == torch.bfloat16
    x = torch.randn(5, 20)
    torch.testing.assert_close(sparse(x), pruned(model, masks)(x), rtol=2e-2, atol=2e-2)
