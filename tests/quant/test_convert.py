import math

import numpy as np
import pytest
import torch

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import QuantLinear
from qsparse.quant import quantize
from qsparse.sparse import magnitude_masks, prunable_weights, sparsify

HALVES = {"fp16": torch.float16, "bf16": torch.bfloat16}
DTYPES = (*HALVES, "int8")


def int8_by_hand(model, x):
    """The int8 model in float64: q = rint(v / scale), scale = absmax / 127, of each row of weights and activations."""
    x = x.double().numpy()
    for layer in model.layers().values():
        quantized = []
        for matrix in (x.astype(np.float32), layer.weight.detach().numpy()):
            scale = np.abs(matrix).max(axis=1, keepdims=True) / np.float32(127)
            scale[scale < np.finfo(np.float32).tiny] = 1
            quantized.append((np.rint(matrix / scale).astype(np.float64), scale.astype(np.float64)))
        (qx, sx), (qw, sw) = quantized
        x = (qx @ qw.T) * sx * sw.T + layer.bias.detach().double().numpy()
        if layer.activation == "relu":
            x = np.maximum(x, 0)
    return x


def test_int8_computes_the_quantized_product():
    model = MLP((50, 40, 6), seed=3)
    x = torch.randn(17, 50)
    quantized = quantize(model, "int8")
    np.testing.assert_allclose(quantized(x).numpy(), int8_by_hand(model, x), rtol=1e-4, atol=1e-5)
    assert not np.allclose(quantized(x).numpy(), model(x).detach().numpy(), rtol=1e-4, atol=1e-5)  # it did quantize


def test_int8_stores_every_layer_in_int8_with_a_scale_a_channel():
    model = MLP((50, 40, 6))
    for name, layer in quantize(model, "int8").layers().items():
        weight = model.layers()[name].weight
        assert isinstance(layer, QuantLinear)
        assert layer.weight.dtype == torch.int8
        assert int(layer.weight.abs().max()) == 127
        torch.testing.assert_close(layer.weight_scale, weight.detach().abs().amax(dim=1) / 127)


@pytest.mark.parametrize("dtype", ["fp16", "bf16"])
def test_halves_hold_the_rounded_weights(dtype):
    model = MLP((50, 40, 6))
    half = quantize(model, dtype)
    assert half.input_dtype == HALVES[dtype]
    for key, tensor in half.state_dict().items():
        assert torch.equal(tensor, model.state_dict()[key].to(HALVES[dtype])), key
    x = torch.randn(5, 50)
    torch.testing.assert_close(half(x), model(x), rtol=0.05, atol=0.05)
    assert half(x).dtype == torch.float32


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_model_given_is_left_alone(dtype):
    model = MLP((8, 6, 4))
    before = {key: tensor.clone() for key, tensor in model.state_dict().items()}
    for tensor in quantize(model, dtype).state_dict().values():
        tensor.zero_()
    assert all(torch.equal(tensor, before[key]) for key, tensor in model.state_dict().items())


def test_a_channel_of_zeros_gives_its_bias():
    model = MLP((8, 6, 4))
    with torch.no_grad():
        model.fc2.weight[1] = 0
    out = quantize(model, "int8")(torch.randn(3, 8))  # a warning would be an error
    assert torch.equal(out[:, 1], model.fc2.bias[1].expand(3))
    assert torch.isfinite(out).all()


def test_an_unknown_dtype_lists_the_valid_ones():
    with pytest.raises(UserError, match=r"'int9'; the valid ones are fp16, bf16, int8, int8wo, int4wo, fp8, int2"):
        quantize(MLP((8, 6, 4)), "int9")


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [math.nan, -math.inf])
def test_weights_that_are_not_finite_are_refused_naming_the_layer(dtype, value):
    model = MLP((8, 6, 4))
    with torch.no_grad():
        model.fc1.bias[2] = value
    with pytest.raises(UserError, match="bias of layer fc1 holds 1 values that are NaN or Inf"):
        quantize(model, dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("first", "message"),
    [
        (lambda model: quantize(model, "int8"), "layer fc1 is already compressed"),
        (lambda model: sparsify(model, magnitude_masks(prunable_weights(model), 1.0)), "fc1 is already compressed"),
        (lambda model: quantize(model, "fp16"), "layer fc1 is already float16"),
        (lambda model: quantize(model, "bf16"), "layer fc1 is already bfloat16"),
    ],
)
def test_what_is_compressed_already_is_refused(first, message, dtype):
    compressed = first(MLP((8, 6, 4)))
    with pytest.raises(UserError, match=message):
        quantize(compressed, dtype)


def test_weights_beyond_float16_are_refused_not_made_infinite():
    model = MLP((8, 6, 4))
    with torch.no_grad():
        model.fc2.weight[0, 0] = 1e5
    with pytest.raises(UserError, match=r"Layer fc2 does not fit float16: it holds 1e\+05"):
        quantize(model, "fp16")
    assert torch.isfinite(quantize(model, "bf16").fc2.weight).all()
