"""Cross-layer equalisation: by hand, without a change of the function, and better for what shares a scale."""

import itertools

import torch

from qsparse.models import MLP
from qsparse.quant import QuantConfig, quantize
from qsparse.quant.equalisation import equalise, equalising


def uneven(sizes=(60, 40, 30, 10)) -> MLP:
    """A model whose hidden units differ in size by up to 1,000, which the next layer takes back."""
    model = MLP(sizes, seed=2)
    layers = list(model.layers().values())
    with torch.no_grad():
        for before, after in itertools.pairwise(layers):
            factor = torch.logspace(-1.5, 1.5, before.out_features)
            before.weight *= factor[:, None]
            before.bias *= factor
            after.weight /= factor
    return model


def test_by_hand():
    W1 = torch.tensor([[1.0, -8.0], [0.5, 0.25], [0.0, 0.0]])
    W2 = torch.tensor([[2.0, 1.0, 1.0], [0.5, -8.0, 1.0]])
    s = equalising(W1, W2)
    torch.testing.assert_close(s, torch.tensor([2.0, 0.25, 1.0]))  # sqrt(8 / 2), sqrt(0.5 / 8), nothing to divide
    torch.testing.assert_close((W1 / s[:, None]).abs().amax(dim=1)[:2], (W2 * s).abs().amax(dim=0)[:2])


def test_the_function_stays_and_the_ranges_meet():
    model, x = uneven(), torch.randn(50, 60)
    even = equalise(model)
    torch.testing.assert_close(even(x), model(x), rtol=1e-3, atol=1e-4)
    layers = list(even.layers().values())
    for before, after in itertools.pairwise(layers):
        rows, columns = before.weight.abs().amax(dim=1), after.weight.abs().amax(dim=0)
        torch.testing.assert_close(rows, columns, rtol=1e-2, atol=0)
    assert not torch.equal(model.fc1.weight, even.fc1.weight)


def test_a_dead_unit_and_a_single_layer_stay():
    model = uneven()
    with torch.no_grad():
        model.fc1.weight[3] = 0
        model.fc2.weight[:, 4] = 0
    assert all(bool(torch.isfinite(tensor).all()) for tensor in equalise(model).parameters())
    single = MLP((60, 10))
    assert torch.equal(equalise(single).fc1.weight, single.fc1.weight)


def test_one_scale_a_tensor_gains_and_needs_no_data():
    model, x = uneven(), torch.randn(300, 60)
    exact = model(x).detach()
    errors = {}
    for method in ("absmax", "equalisation"):
        config = QuantConfig(granularity="tensor", method=method)
        errors[method] = float((quantize(model, config)(x) - exact).norm())
    assert errors["equalisation"] < 0.3 * errors["absmax"]
    assert config.variant == "int8-tensor-equalisation"
    assert not config.needs_data
    assert config.fields()["calibration_samples"] is None
