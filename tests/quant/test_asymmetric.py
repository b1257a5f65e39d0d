"""int8 with zero points of the activations: against its oracle, its description, and the symmetric kind."""

import numpy as np
import pytest
import torch

import qsparse
from qsparse import checkpoint, nn
from qsparse.data import normalize
from qsparse.models import MLP
from qsparse.nn import ZeroPointLinear
from qsparse.oracles.gemm_int8 import gemm_int8
from qsparse.oracles.quantize_rows import quantize_rows
from qsparse.quant import QuantConfig, quantize

IMAGES = torch.randint(0, 256, (300, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
STATIC = {"activations": "static", "calibration": "minmax"}
OPTIONS = pytest.mark.parametrize("options", [{}, STATIC], ids=["dynamic", "static"])


@pytest.fixture(scope="module")
def model() -> MLP:
    return MLP((784, 40, 10), seed=1)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@OPTIONS
def test_it_is_its_oracle_bit_for_bit(model, options, device):
    quantized = quantize(model, QuantConfig(symmetric=False, **options), IMAGES)
    x = 1.5 * torch.randn(1100, 784) + 0.5  # beyond the range, and beyond a slice of the CPU's
    expected = x.numpy()
    for layer in quantized.layers().values():
        assert isinstance(layer, ZeroPointLinear)
        if options:
            scale, zero = layer.input_scale.numpy(), layer.input_zero.numpy()
            q = np.clip(np.rint(expected / scale) + zero, 0, 255).astype(np.uint8)
        else:
            q, scale, zero = quantize_rows(expected, symmetric=False)
        parts = (layer.weight.numpy(), scale, layer.weight_scale.numpy(), layer.bias.numpy())
        expected = gemm_int8(q, *parts, relu=layer.activation == "relu", zero_x=zero)
    assert np.array_equal(quantized.to(device)(x.to(device)).cpu().numpy(), expected)


@OPTIONS
def test_weights_stay_symmetric_and_what_comes_from_a_relu_gets_a_step_half_as_wide(model, options):
    plain, shifted = (quantize(model, QuantConfig(symmetric=s, **options), IMAGES) for s in (True, False))
    assert torch.equal(plain.fc1.weight, shifted.fc1.weight)
    assert torch.equal(shifted.fc1.weight_sums, shifted.fc1.weight.sum(1, dtype=torch.int32))
    if options:
        torch.testing.assert_close(shifted.fc2.input_scale / plain.fc2.input_scale, torch.tensor([127 / 255]))
        assert shifted.fc2.input_zero == 0
        assert shifted.fc1.input_zero == round(0.4242 / (0.4242 + 2.8215) * 255)
    hidden = model.fc1(normalize(IMAGES, torch.float32)).detach()
    exact = model.fc2(hidden).detach()
    assert (shifted.fc2(hidden) - exact).norm() < (plain.fc2(hidden) - exact).norm()


@OPTIONS
def test_it_survives_the_disk_and_its_description(model, options, tmp_path):
    quantized = quantize(model, QuantConfig(symmetric=False, **options), IMAGES)
    checkpoint.save_model(tmp_path / "v", quantized, {"variant": "v"})
    assert torch.equal(qsparse.load(tmp_path / "v")(IMAGES), quantized(IMAGES))
    described = quantized.fc1.describe()
    assert nn.from_description(described).describe() == described
    assert quantized.fc1.cpu_kernel().startswith("gemm_int8:cpu")
    assert QuantConfig(symmetric=False, **options).variant.startswith("int8")
    assert "asym" in QuantConfig(symmetric=False, **options).variant


@OPTIONS
def test_a_row_that_is_not_finite_spoils_only_itself(model, options):
    layer = quantize(model, QuantConfig(symmetric=False, **options), IMAGES).fc1
    x = torch.randn(5, 784)
    for value in (torch.nan, torch.inf):
        spoilt = x.clone()
        spoilt[2, 7] = value
        out = layer(spoilt)
        assert bool(out[2].isnan().all())
        assert torch.equal(out[[0, 1, 3, 4]], layer(x)[[0, 1, 3, 4]])
    assert layer(torch.zeros(0, 784)).shape == (0, 40)
    assert torch.equal(layer(torch.zeros(2, 784)), layer.bias.relu().expand(2, 40))


def test_a_row_of_large_numbers_whose_sum_overflows_is_finite(model):
    quantized = quantize(model, QuantConfig(symmetric=False, **STATIC), IMAGES)
    assert quantized(torch.full((1, 784), 3e38)).isfinite().all()


def test_what_cannot_be_is_refused():
    with pytest.raises(ValueError, match='activation must be None or "relu"'):
        ZeroPointLinear(3, 4, activation="gelu")
    with pytest.raises(ValueError, match="activations must be"):
        ZeroPointLinear(3, 4, activations="fixed")
