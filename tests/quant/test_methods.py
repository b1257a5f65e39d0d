"""GPTQ, SmoothQuant and bias correction: each against an oracle, and better than rounding where it should be."""

import math

import numpy as np
import pytest
import torch

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import QuantLinear
from qsparse.quant import QuantConfig, config, quantize, schemes
from qsparse.quant.bias_correction import corrected_bias
from qsparse.quant.gptq import gptq, inverse_factor
from qsparse.quant.smoothquant import migrate, smoothing

IMAGES = torch.randint(0, 256, (300, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))
GRANULARITIES = pytest.mark.parametrize("granularity", config.GRANULARITIES)


def correlated(s: int, k: int, seed: int = 0) -> torch.Tensor:
    """Inputs (s, k) of which each resembles its neighbours, as pixels do."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(s, k, generator=generator).cumsum(dim=1) / math.sqrt(k) + 0.3


def reals(parts, w, granularity, group):
    q, scale, zero = parts
    s, z = (schemes.spread(value, w, granularity, group) for value in (scale, zero))
    return schemes.to_reals(q, s, z)


def output_error(w, w_hat, x) -> float:
    return float((x.double() @ (w - w_hat).double().T).norm())


# --- GPTQ -----------------------------------------------------------------------------------------------------------


def by_brute_force(W, X, bits, granularity, group, symmetric):
    """Optimal brain surgeon, column by column: invert what is left of the Hessian anew for each."""
    W, X = W.double().numpy().copy(), X.double().numpy()
    n, k = W.shape
    H = 2 * X.T @ X
    H += 0.01 * np.diag(H).mean() * np.eye(k)
    out = np.empty((n, k))
    for i in range(k):
        if granularity == "group" and i % group == 0:
            columns = slice(i, i + group)
        elif i == 0:
            columns = slice(0, k)
        else:
            columns = None
        if columns:
            part = torch.tensor(W[:, columns]).float()
            kind = "tensor" if granularity == "tensor" else "channel"
            scale, zero = (
                value[:, 0].double().numpy() for value in schemes.weight_grid(part, bits, kind, k, symmetric)
            )
        q = np.clip(np.rint(W[:, i] / scale) + zero, *schemes.limits(bits, symmetric))
        out[:, i] = scale * (q - zero)
        inverse = np.linalg.inv(H[i:, i:])
        W[:, i:] -= np.outer((W[:, i] - out[:, i]) / inverse[0, 0], inverse[0])
    return out


@GRANULARITIES
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("k", [1, 40, 150])  # beyond a block of 128, with a short last group
def test_gptq_is_the_brute_force_it_stands_for(k, granularity, symmetric):
    W, X = torch.randn(5, k, generator=torch.Generator().manual_seed(k)), correlated(400, k)
    found = reals(gptq(W, X, 4, granularity, 32, symmetric), W, granularity, 32)
    expected = torch.tensor(by_brute_force(W, X, 4, granularity, 32, symmetric)).float()
    # A weight that lies within float32's rounding of the middle of two integers may go either way
    assert float((found - expected).abs().gt(1e-5).float().mean()) < 0.01


def test_the_factor_of_the_inverse():
    X = correlated(50, 12)
    H = 2 * X.double().T @ X.double()
    H += 0.01 * H.diagonal().mean() * torch.eye(12)
    U = inverse_factor(X)
    torch.testing.assert_close(U.T @ U @ H, torch.eye(12, dtype=torch.float64))
    assert torch.equal(U, U.triu())


@GRANULARITIES
@pytest.mark.parametrize("bits", [2, 3, 4, 8])
def test_gptq_keeps_the_outputs_better_than_rounding(bits, granularity):
    W, X = torch.randn(20, 200, generator=torch.Generator().manual_seed(bits)), correlated(500, 200)
    scheme = (bits, granularity, 64, True)
    rounded = reals(schemes.round_weights(W, *scheme), W, granularity, 64)
    better = reals(gptq(W, X, *scheme), W, granularity, 64)
    assert output_error(W, better, X) < 0.7 * output_error(W, rounded, X)
    unseen = correlated(500, 200, seed=1)
    assert output_error(W, better, unseen) < output_error(W, rounded, unseen)


def test_gptq_of_inputs_that_say_nothing_is_rounding():
    W = torch.randn(4, 70)
    for X in (torch.zeros(30, 70), torch.eye(70)):  # none, and all independent
        for found, rounded in zip(gptq(W, X, 4), schemes.round_weights(W, 4), strict=True):
            assert torch.equal(found, rounded)


def test_gptq_of_zeros_and_of_nothing():
    W = torch.randn(4, 70)
    W[1] = 0
    assert not reals(gptq(W, correlated(50, 70), 4, "group", 32), W, "group", 32)[1].any()
    for granularity in config.GRANULARITIES:
        assert gptq(torch.zeros(3, 0), torch.zeros(5, 0), 4, granularity)[0].shape == (3, 0)


# --- SmoothQuant ----------------------------------------------------------------------------------------------------


def test_smoothing_by_hand():
    X = torch.tensor([[1.0, -16.0, 0.0, 3.0], [-4.0, 2.0, 0.0, 1.0]])
    W = torch.tensor([[1.0, 0.25, 2.0, 0.0], [0.5, -1.0, 1.0, 0.0]])
    assert smoothing(X, W).tolist() == [2, 4, 1, 1]  # sqrt(4 / 1), sqrt(16 / 1); no input, no weight
    assert smoothing(X, W, alpha=1)[:2].tolist() == [4, 16]


def outlying() -> tuple[MLP, dict[str, torch.Tensor]]:
    """A model some of whose hidden units are 50 times larger than the others, and weigh as much less; its inputs."""
    model = MLP((784, 60, 10), seed=2)
    with torch.no_grad():
        model.fc1.weight[:3] *= 50
        model.fc1.bias[:3] *= 50
        model.fc2.weight[:, :3] /= 50
    x = torch.randn(300, 784)
    return model, {"fc1": x, "fc2": model.fc1(x).detach()}


def test_migration_keeps_the_function_and_smooths_the_activations():
    model, inputs = outlying()
    smooth = migrate(model, inputs)
    torch.testing.assert_close(smooth(inputs["fc1"]), model(inputs["fc1"]), rtol=1e-4, atol=1e-5)
    before, after = (x.abs().amax(dim=0) for x in (inputs["fc2"], smooth.fc1(inputs["fc1"])))
    assert after.max() / after.median() < 0.2 * before.max() / before.median()


def test_smoothquant_lowers_the_error_of_the_outputs():
    model, inputs = outlying()
    x = inputs["fc1"]
    exact = model(x).detach()
    errors = {
        method: float((quantize(model, QuantConfig(method=method), x)(x) - exact).norm())
        for method in ("absmax", "smoothquant")
    }
    assert errors["smoothquant"] < 0.7 * errors["absmax"]


# --- bias correction ------------------------------------------------------------------------------------------------


def test_corrected_bias_gives_the_mean_back():
    exact, quantized = torch.randn(50, 4), torch.randn(50, 4) + 1
    for bias in (None, torch.randn(4)):
        moved = corrected_bias(bias, exact, quantized) - (0 if bias is None else bias)
        torch.testing.assert_close((quantized + moved).mean(dim=0), exact.mean(dim=0))


@pytest.mark.parametrize("options", [{"dtype": "int8", "granularity": "tensor"}, {"dtype": "int3wo", "simulate": True}])
def test_bias_correction_lowers_the_error_of_each_layer_by_the_square_of_its_mean(options):
    model, x = MLP((784, 60, 10), seed=3), correlated(200, 784)
    inputs = {"fc1": x, "fc2": model.fc1(x).detach()}
    plain, corrected = (quantize(model, QuantConfig(method=m, **options), x) for m in ("absmax", "bias-correction"))
    for name, layer in model.layers().items():
        before, after = (one.layers()[name] for one in (plain, corrected))
        layer.activation = before.activation = after.activation = None
        wrong, less = (one(inputs[name]) - layer(inputs[name]).detach() for one in (before, after))
        torch.testing.assert_close(less, wrong - wrong.mean(dim=0), rtol=1e-3, atol=1e-5)
        assert less.norm() < wrong.norm()


# --- in a configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("method", ["gptq", "smoothquant", "bias-correction"])
def test_a_method_reaches_the_integers_and_needs_data(method):
    model, config = MLP((784, 60, 10), seed=3), QuantConfig(method=method)
    quantized, plain = quantize(model, config, IMAGES), quantize(model, "int8")
    assert all(isinstance(layer, QuantLinear) for layer in quantized.layers().values())
    assert any(not torch.equal(a, b) for a, b in zip(quantized.buffers(), plain.buffers(), strict=True))
    torch.testing.assert_close(quantized(IMAGES), model(IMAGES), rtol=0.05, atol=0.05)
    assert config.variant == f"int8-{method}"
    assert config.fields()["method"] == method
    assert config.fields()["calibration_samples"] == 1024
    with pytest.raises(UserError, match="was given none"):
        quantize(model, config)
    with pytest.raises(UserError, match="There are no calibration data"):
        quantize(model, config, IMAGES[:0])
    spoilt = torch.randn(20, 784)
    spoilt[3, 4] = math.nan
    with pytest.raises(UserError, match="Calibration of layer fc1: 1 of its values are NaN or Inf"):
        quantize(model, config, spoilt)


def test_smoothquant_without_activations_is_refused():
    with pytest.raises(UserError, match="smoothquant has nothing to smooth"):
        QuantConfig("int4wo", simulate=True, method="smoothquant")
