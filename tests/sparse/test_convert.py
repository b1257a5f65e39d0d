import math

import pytest
import torch

import qsparse
from qsparse import models, nn
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant import quantize
from qsparse.sparse import FORMATS, magnitude_masks, prunable_weights, sparsify
from qsparse.sparse.config import AUTO, STORED
from qsparse.sparse.masks import largest_of_each_group


def pruned(model, masks):
    """The dense model with zeros where the masks are False."""
    expected = model.replace({})
    with torch.no_grad():
        for name, layer in expected.layers().items():
            layer.weight *= masks[name]
    return expected


ANYWHERE = ("csr", "coo", "bitmap")  # formats that hold any mask, in float32


@pytest.mark.parametrize("format", ANYWHERE)
@pytest.mark.parametrize("density", [0.3, 0.5, 1.0])
def test_a_sparse_model_computes_what_the_pruned_dense_one_does(format, density):
    model = MLP((20, 30, 7), seed=1)
    masks = magnitude_masks(prunable_weights(model), density)
    sparse = sparsify(model, masks, format, "fp32")
    x = torch.randn(9, 20)
    torch.testing.assert_close(sparse(x), pruned(model, masks)(x), rtol=1e-5, atol=1e-6)
    assert sum(layer.nnz for layer in sparse.layers().values()) == round(density * (20 * 30 + 30 * 7))
    assert {layer.format for layer in sparse.layers().values()} == {format}


@pytest.mark.parametrize(
    ("format", "dtype"),
    [(name, dtype) for name in FORMATS for dtype in ("fp16", "bf16", "fp32") if dtype in STORED.get(name, (dtype,))],
)
def test_every_format_computes_a_pattern_whatever_the_widths(format, dtype):
    model = MLP((21, 30, 7), seed=1)
    masks = {name: largest_of_each_group(w.abs(), 2, 4) for name, w in prunable_weights(model).items()}
    stored = sparsify(model, masks, format, dtype)
    x = torch.randn(9, 21)
    expected = pruned(model, masks)
    if dtype != "fp32":
        expected = quantize(expected, dtype)
    torch.testing.assert_close(stored(x), expected(x), rtol=1e-2, atol=1e-2 if dtype == "bf16" else 1e-3)
    if format != AUTO:
        assert sum(layer.nnz for layer in stored.layers().values()) == sum(int(m.sum()) for m in masks.values())
    again = models.from_description(stored.describe())
    again.load_state_dict(stored.state_dict())
    assert torch.equal(again(x), stored(x))


def test_2_of_4_is_stored_in_half_a_half_and_an_eighth_of_a_byte():
    model = MLP((784, 64, 10))
    masks = {name: largest_of_each_group(w.abs(), 2, 4) for name, w in prunable_weights(model).items()}
    layer = sparsify(model, masks, "2:4").fc1
    assert {name: (tuple(t.shape), t.dtype) for name, t in layer.state_dict().items()} == {
        "values": ((64, 392), torch.float16), "metadata": ((64, 98), torch.uint8), "bias": ((64,), torch.float16)
    }  # fmt: skip


def test_metadata_that_are_none_are_refused_when_they_are_loaded():
    model = MLP((12, 4, 2))
    masks = {name: largest_of_each_group(w.abs(), 2, 4) for name, w in prunable_weights(model).items()}
    layer = sparsify(model, masks, "2:4", "fp32").fc1
    for name, value, message in (("metadata", 0, "lower one first"), ("values", 1, "values beyond column 12")):
        state = {key: torch.full_like(t, value) if key == name else t for key, t in layer.state_dict().items()}
        with pytest.raises(ValueError, match=message):
            nn.from_description(layer.describe()).load_state_dict(state)


def test_what_is_not_2_of_4_and_what_does_not_fit_16_bits_is_refused():
    model = MLP((8, 4, 2))
    with pytest.raises(ValueError, match="row 0 has more than two entries in columns 0 to 3"):
        sparsify(model, full_masks(model), "2:4")
    with torch.no_grad():
        model.fc2.weight[0, 0] = 1e5
    with pytest.raises(UserError, match="Layer fc2 does not fit float16"):
        sparsify(model, full_masks(model), "csr", "fp16")


@pytest.mark.parametrize("format", FORMATS)
def test_biases_stay_whole_and_nothing_is_shared(format):
    model = MLP((4, 3, 2))
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    masks = {name: torch.zeros_like(weight, dtype=torch.bool) for name, weight in prunable_weights(model).items()}
    sparse = sparsify(model, masks, format)
    for name, layer in sparse.layers().items():
        assert format == "2:4" or layer.nnz == 0
        torch.testing.assert_close(layer.bias.float(), before[f"{name}.bias"], rtol=1e-3, atol=1e-4)
        layer.bias.fill_(7)
    assert all(torch.equal(model.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(sparse(torch.randn(3, 4)), torch.full((3, 2), 7.0))


def test_an_unknown_format_lists_the_valid_ones():
    model = MLP((4, 3, 2))
    with pytest.raises(UserError, match="unknown format 'bsr': choose one of csr, coo, 2:4, "):
        sparsify(model, magnitude_masks(prunable_weights(model), 0.5), "bsr")


def test_a_width_below_zero_is_refused():
    model = MLP((4, 3), seed=0)
    layer = sparsify(model, magnitude_masks(prunable_weights(model), 0.5), "coo").fc1
    layer.in_features = -1
    with pytest.raises(ValueError, match="cannot be -1 and 3"):
        layer.check()


def test_formats_of_single_layers_are_checked_too():
    model = MLP((20, 8, 3), seed=0)
    masks = magnitude_masks(prunable_weights(model), 0.5)
    mixed = sparsify(model, masks, {"fc1": "csr", "fc2": "dense"})
    assert [type(layer).__name__ for layer in mixed.children()] == ["SparseLinear", "Linear"]
    for formats, dtype, message in (
        ({"fc1": "bsr", "fc2": "csr"}, None, "unknown format 'bsr'"),
        ({"fc1": "auto", "fc2": "csr"}, None, "unknown format 'auto'"),
        ({"fc1": "csr"}, None, "formats are for fc1; the layers are fc1, fc2"),
        ({"fc1": "bitmap", "fc2": "csr"}, "int8", "bitmap"),
    ):
        with pytest.raises(UserError, match=message):
            sparsify(model, masks, formats, dtype)


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


def test_a_model_of_float64_is_refused():
    with pytest.raises(UserError, match="its layer fc1 holds float64, and not float32, float16 or bfloat16"):
        sparsify(MLP((20, 4)).double(), {"fc1": torch.ones(4, 20, dtype=torch.bool)})


def test_masks_must_fit_the_layers():
    model = MLP((4, 3, 2))
    masks = full_masks(model)
    with pytest.raises(ValueError, match="name the layers fc1, fc2, not fc1"):
        sparsify(model, {"fc1": masks["fc1"]})
    with pytest.raises(ValueError, match="one shape"):
        sparsify(model, {"fc1": masks["fc1"], "fc2": masks["fc1"]})
    for rubbish in (0.1, None, [masks], "csr"):
        with pytest.raises(TypeError, match=r"masks must be a SparseConfig, or a dict .* SparseConfig\(0\.1\)"):
            qsparse.sparsify(model, rubbish)
    with pytest.raises(TypeError, match="the mask of layer fc2 must be bool"):
        sparsify(model, {**masks, "fc2": [True]})
    with pytest.raises(TypeError, match="bool"):
        sparsify(model, {name: mask.float() for name, mask in masks.items()})


def test_a_half_precision_model_can_be_sparsified():
    model = quantize(MLP((20, 30, 7)), "bf16")
    masks = magnitude_masks(prunable_weights(model), 0.5)
    sparse = sparsify(model, masks, "csr")
    assert sparse.fc1.values.dtype == torch.bfloat16
    x = torch.randn(5, 20)
    torch.testing.assert_close(sparse(x), pruned(model, masks)(x), rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(
    ("scales", "error", "message"),
    [
        ([1.0], TypeError, "scales must be a dict from a layer's name to a tensor, not list"),
        ({"fc1": torch.ones(30)}, ValueError, "scales must name the layers fc1, fc2, not fc1"),
        (
            {"fc1": [1.0] * 30, "fc2": torch.ones(7)},
            TypeError,
            "scales of layer fc1 must be float32, a .* not list",
        ),
        ({"fc1": torch.ones(30).double(), "fc2": torch.ones(7)}, TypeError, r"float32, a torch.Tensor, not .*float64"),
        ({"fc1": torch.ones(30), "fc2": torch.ones(1)}, ValueError, "layer fc2 has 7 outputs and takes as many scales"),
        ({"fc1": torch.ones(30), "fc2": torch.tensor(1.0)}, ValueError, "layer fc2 has 7 outputs"),
        ({"fc1": torch.zeros(30), "fc2": torch.ones(7)}, ValueError, "layer fc1 must be above 0 and finite"),
        ({"fc1": torch.full((30,), torch.nan), "fc2": torch.ones(7)}, ValueError, "layer fc1 must be above 0"),
        ({"fc1": torch.ones(30), "fc2": torch.full((7,), torch.inf)}, ValueError, "layer fc2 must be above 0"),
    ],
)
@pytest.mark.parametrize("format", ["csr", "2:4"])
def test_scales_that_are_none_are_refused(scales, error, message, format):
    model = MLP((20, 30, 7))
    masks = {name: largest_of_each_group(w.abs(), 2, 4) for name, w in prunable_weights(model).items()}
    with pytest.raises(error, match=message):
        sparsify(model, masks, format, "int8", scales=scales)
    with pytest.raises(ValueError, match="scales are of the dtype int8, not of fp16"):
        sparsify(model, masks, format, "fp16", scales=scales)
