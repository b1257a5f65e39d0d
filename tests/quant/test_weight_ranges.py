"""Ranges of the weights, apart from those of the activations: by hand, and in a configuration."""

import numpy as np
import pytest
import torch

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant import QuantConfig, quantize, ranges, weight_ranges

IMAGES = torch.randint(0, 256, (100, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


def outlying(seed=0) -> torch.Tensor:
    w = torch.randn(6, 200, generator=torch.Generator().manual_seed(seed))
    w[2, 3], w[4, 5] = 6, -7
    w[5] = 0
    return w


@pytest.mark.parametrize("percent", [50, 99, 99.9, 100])
def test_percentile_is_numpy_s_of_each_row(percent):
    w = outlying()
    lo, hi = weight_ranges.percentile(w, percent)
    for row, low, high in zip(w.numpy(), lo, hi, strict=True):
        cut = np.percentile(np.abs(row), percent)
        np.testing.assert_allclose((low, high), (max(row.min(), -cut), min(row.max(), cut)), rtol=1e-5)


@pytest.mark.parametrize(("bits", "symmetric"), [(4, True), (4, False), ("e2m1", True)])
def test_mse_is_the_observer_s_of_each_row(bits, symmetric):
    w = outlying()[:5]
    lo, hi = weight_ranges.mse(w, bits, symmetric)
    for row, low, high in zip(w, lo, hi, strict=True):
        observer = ranges.Mse(bits, symmetric)
        observer.see(row)
        np.testing.assert_allclose((low, high), observer.range(), rtol=1e-5)
    assert hi[2] < 6  # the outlier is clipped


def test_a_row_of_zeros_has_no_range_and_no_warning():
    w = torch.zeros(3, 10)
    found = [weight_ranges.percentile(w, 99), weight_ranges.mse(w, 4, True), weight_ranges.entropy(w, 4)]
    assert all(not bound.any() for pair in found for bound in pair)


CONFIGS = {
    "percentile": {"weight_percentile": 99},
    "entropy": {"granularity": "tensor"},
    "fixed": {"weight_range": (-0.02, 0.02)},
}


@pytest.mark.parametrize("name", CONFIGS)
def test_a_weight_range_reaches_the_weights_and_not_the_activations(name):
    model = MLP((784, 40, 10), seed=1)
    with torch.no_grad():
        model.fc1.weight[0, 0] = 0.5  # the others lie within 0.036
    static = {
        "activations": "static",
        "calibration": "minmax",
        "granularity": CONFIGS[name].get("granularity", "channel"),
    }
    plain = quantize(model, QuantConfig(**static), IMAGES)
    config = QuantConfig(weight_calibration=name, **{**static, **CONFIGS[name]})
    clipped = quantize(model, config, IMAGES)
    assert torch.equal(clipped.fc1.input_scale, plain.fc1.input_scale)
    assert clipped.fc1.weight_scale[0] < 0.5 * plain.fc1.weight_scale[0]
    assert clipped.fc1.weight[0, 0] == 127
    assert config.fields()["weight_calibration"] == name
    assert f"-w_{name}" in config.variant


def test_mse_lowers_the_error_of_few_bits():
    """In every granularity, and under GPTQ too."""
    w, x = outlying(1)[:5], torch.randn(400, 200)
    model = MLP((200, 5))
    with torch.no_grad():
        model.fc1.weight.copy_(w)
    exact = model(x).detach()
    for granularity in ("tensor", "channel", "group"):
        for method in ("absmax", "gptq"):
            options = {"granularity": granularity, "group": 32, "method": method, "simulate": True}
            plain, mse = (
                quantize(model, QuantConfig("int3wo", weight_calibration=name, **options), x)(x) - exact
                for name in ("minmax", "mse")
            )
            assert mse.norm() < plain.norm(), (granularity, method)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"weight_calibration": "kl"}, "Unknown weight calibration 'kl'; the valid ones are minmax"),
        ({"weight_calibration": "fixed"}, "--weight-range LO HI is the range of --weight-calibration fixed"),
        ({"weight_range": (-1, 1)}, "--weight-range LO HI is the range of"),
        ({"weight_calibration": "fixed", "weight_range": (1, -1)}, "--weight-range is 1 -1: LO must be below HI"),
        ({"weight_calibration": "percentile", "weight_percentile": 0}, r"--weight-percentile is 0: .* \(0, 100\]"),
        ({"weight_calibration": "entropy"}, "needs the weights of a whole layer: --granularity tensor"),
        ({"dtype": "fp16", "weight_calibration": "mse"}, "fp16 is a rounding of every number"),
    ],
)
def test_what_is_refused(options, message):
    with pytest.raises(UserError, match=message):
        QuantConfig(**options)
