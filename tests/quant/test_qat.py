"""Quantization-aware training: what runs forward, what comes back, and what it gains."""

import functools
import json
import math

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli, data, load, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear, ZeroPointLinear
from qsparse.quant import QuantConfig, quantize, schemes, train_quantized
from qsparse.quant.convert import prepare
from qsparse.quant.qat import FakeQuantize, QatLinear
from qsparse.quant.simulate import SimulatedLinear
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate, fit
from qsparse.train.run import train

LSQ = {"activations": "static", "calibration": "lsq", "weight_calibration": "lsq"}
SIMULATED = {"simulate": True}
CONFIGS = {
    "int8": {},
    "int8 static": {"activations": "static", "calibration": "mse", "granularity": "tensor"},
    "int8 lsq": LSQ,
    "int8 asymmetric": {"symmetric": False, "activations": "static", "calibration": "minmax"},
    "int4": {"dtype": "int4", **SIMULATED},
    "int4 lsq of groups": {"dtype": "int4", "granularity": "group", "group": 100, **LSQ, **SIMULATED},
    "int4 asymmetric": {"dtype": "int4", "symmetric": False, **SIMULATED},
    "int3wo lsq": {"dtype": "int3wo", "weight_calibration": "lsq", **SIMULATED},
    "fp4": {"dtype": "fp4", **SIMULATED},
}
CONFIGS = {name: QuantConfig(**options, qat_epochs=1) for name, options in CONFIGS.items()}


X = torch.randn(200, 784, generator=torch.Generator().manual_seed(0))


def first_layer(config, device="cpu") -> QatLinear:
    """The first layer of a small model, calibrated on X."""
    model = MLP((784, 24, 10), seed=1).to(device)
    return QatLinear(model.fc1, config, prepare(model, config, X.to(device)).grids.get("fc1"))


def check_the_forward_pass(config, device):
    layer = first_layer(config, device=device)
    x = 2 * torch.randn(33, 784, device=device)
    with torch.no_grad():
        layer.weight += 0.01 * torch.randn_like(layer.weight)
    out, frozen = layer(x), layer.frozen()
    real = QuantLinear if config.symmetric else ZeroPointLinear
    assert isinstance(frozen, real if config.dtype == "int8" else SimulatedLinear)
    assert out.requires_grad
    assert torch.equal(out.detach(), frozen(x))
    with torch.no_grad():
        assert torch.equal(layer(x), frozen(x))
    assert not any(parameter.requires_grad for parameter in frozen.parameters())


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_the_forward_pass_is_that_of_inference_bit_for_bit(config):
    check_the_forward_pass(config, "cpu")


@pytest.mark.gpu
def test_the_forward_pass_on_a_gpu_is_that_of_inference():
    for config in CONFIGS.values():
        check_the_forward_pass(config, "cuda")


@pytest.mark.parametrize("config", CONFIGS.values(), ids=CONFIGS)
def test_what_stands_for_the_rounding_backward_is_what_ran_forward(config):
    """The float product of the rounded numbers: the values that the gradients are of."""
    layer = first_layer(config)
    layer.activation = None
    x = torch.randn(7, 784)
    by_floats = torch.nn.functional.linear(layer._inputs(x), layer._weights(), layer.bias)
    torch.testing.assert_close(by_floats, layer(x), rtol=1e-4, atol=1e-5)


def test_gradients_are_those_of_the_rounded_layer():
    """dW = dz.T x^, dx = dz W^, db = the sum of dz, with x^ and W^ rounded; an unused output gives nothing."""
    layer = first_layer(QuantConfig(qat_epochs=1))
    x = torch.randn(6, 784, requires_grad=True)
    dy = torch.randn(6, 24)
    out = layer(x)
    dx, dw, db = torch.autograd.grad(out, (x, layer.weight, layer.bias), dy)
    dz = dy * (out > 0)
    w = quantize(MLP((784, 24, 10), seed=1), "int8").fc1
    x_hat = schemes.to_reals(*_rounded(x.detach()))
    torch.testing.assert_close(dw, dz.T @ x_hat, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(dx, dz @ (w.weight * w.weight_scale[:, None]), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(db, dz.sum(dim=0))


def _rounded(x):
    scale, zero = schemes.scale_and_zero(*x.aminmax(dim=1, keepdim=True), 8)
    return schemes.to_grid(x, scale, zero, 8), scale, zero


def test_the_gradients_of_a_learned_step_by_hand():
    """Of 3 bits, up to Q_P = 3: what is clipped gives ±3 to the step and nothing to v; else rint(v/s) - v/s."""
    v = torch.tensor([[0.2, -0.9, 1.3, 5.0], [-7.0, 0.75, 0.5, 0.0]], requires_grad=True)
    s = torch.tensor([0.5], requires_grad=True)
    out = FakeQuantize.apply(v, s, torch.zeros(1), 3, True, 8)
    torch.testing.assert_close(out.detach(), torch.tensor([[0.0, -1.0, 1.5, 1.5], [-1.5, 1.0, 0.5, 0.0]]))
    upstream = torch.tensor([[1.0, 2.0, 3.0, 4.0], [5.0, 6.0, 7.0, 8.0]])
    by_v, by_s = torch.autograd.grad(out, (v, s), upstream)
    inside = torch.tensor([[1.0, 1.0, 1.0, 0.0], [0.0, 1.0, 1.0, 1.0]])
    assert torch.equal(by_v, upstream * inside)
    each = torch.tensor([[-0.4, -0.2, 0.4, 3.0], [-3.0, 0.5, 0.0, 0.0]])
    torch.testing.assert_close(by_s, (upstream * each).sum().reshape(1) / math.sqrt(8 * 3))


@pytest.mark.parametrize("bits", [4, "e2m1"])
def test_a_step_a_channel_gets_the_gradient_of_its_channel(bits):
    v = torch.randn(5, 30)
    s = torch.full((5, 1), 0.3, requires_grad=True)
    (by_s,) = torch.autograd.grad(FakeQuantize.apply(v, s, torch.zeros(5, 1), bits, True, 30).sum(), s)
    for row, step, whole in zip(v, s.detach(), by_s, strict=True):
        step = step.clone().requires_grad_()
        (alone,) = torch.autograd.grad(FakeQuantize.apply(row, step, torch.zeros(1), bits, True, 30).sum(), step)
        torch.testing.assert_close(alone, whole)


def test_where_a_learned_step_starts():
    config = QuantConfig("int4", **LSQ, **SIMULATED, qat_epochs=1)
    layer = first_layer(config)
    expected = 2 * layer.weight.detach().abs().mean(dim=1, keepdim=True) / math.sqrt(7)
    torch.testing.assert_close(layer.weight_step().detach(), expected)
    torch.testing.assert_close(layer.input_step().detach(), 2 * X.abs().mean().reshape(1) / math.sqrt(7))


@pytest.mark.parametrize("driven", [0.0, -1.0, -1e30])
def test_a_learned_step_that_is_driven_below_zero_stays_positive(driven):
    config = QuantConfig("int4", **LSQ, **SIMULATED, qat_epochs=1)
    layer = first_layer(config)
    with torch.no_grad():
        layer.weight_step.value.fill_(driven)
        layer.input_step.value.fill_(driven)
    out = layer(torch.randn(4, 784))
    assert bool((layer.weight_step.value > 0).all())
    assert bool((layer.input_step.value > 0).all())
    assert torch.isfinite(out).all()
    gradients = torch.autograd.grad(out.sum(), list(layer.parameters()))
    assert all(bool(torch.isfinite(gradient).all()) for gradient in gradients)
    with torch.no_grad():
        layer.weight_step.value.fill_(driven)
    assert float(layer.frozen().weight.abs().max()) < 1  # and nothing was negated
    assert bool((layer.frozen().weight * layer.weight >= 0).all())


@pytest.fixture(scope="module")
def dataset():
    return data.load("mnist-5k", None)


@pytest.fixture(scope="module")
def trained(dataset):
    model = MLP((784, 32, 10), seed=0)
    fit(model, dataset, TrainConfig(epochs=3))
    return model


@pytest.mark.parametrize(
    ("options", "device"),
    [({}, "cpu"), ({"weight_calibration": "lsq"}, "cpu"), pytest.param({}, "cuda", marks=pytest.mark.gpu)],
    ids=["ste", "lsq", "gpu"],
)
def test_training_recovers_what_few_bits_lose(dataset, trained, options, device):
    dataset, model = dataset.to(device), trained.replace({}).to(device)
    rounded = quantize(model, QuantConfig("int2wo", **SIMULATED))
    config = QuantConfig("int2wo", **options, **SIMULATED, qat_epochs=2)
    learned = train_quantized(model, config, dataset, TrainConfig())
    exact, lost, recovered = (evaluate(each, dataset.validation)[0] for each in (model, rounded, learned))
    assert recovered > exact - 0.05
    assert recovered > lost + 0.1
    assert len(learned.fc1.weight[0].unique()) <= 3  # it is of 2 bits
    before = trained.state_dict()
    assert all(torch.equal(tensor.cpu(), before[name]) for name, tensor in model.state_dict().items())


def test_training_is_the_same_again(dataset, trained):
    config = QuantConfig("int4", **LSQ, **SIMULATED, qat_epochs=1)
    one, other = (train_quantized(trained, config, dataset, TrainConfig()) for _ in range(2))
    assert all(torch.equal(a, b) for a, b in zip(one.buffers(), other.buffers(), strict=True))


def test_int8_gives_int8_layers_and_leaves_others_alone(dataset, trained):
    config = QuantConfig("fp32", layers={"fc1": "int8", "fc2": "fp16"}, qat_epochs=1)
    learned = train_quantized(trained, config, dataset, TrainConfig())
    assert isinstance(learned.fc1, QuantLinear)
    assert isinstance(learned.fc2, Linear)
    assert learned.fc2.weight.dtype == torch.float16
    assert not torch.equal(learned.fc2.weight.float(), trained.fc2.weight)
    assert evaluate(learned, dataset.validation)[0] > 0.8


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"qat_epochs": -1}, "--qat-epochs is -1"),
        ({"lr": 0.1}, "--lr is of quantization-aware training"),
        ({"qat_epochs": 1, "lr": 0.0}, "--lr is 0.0: it must be above 0"),
        ({"qat_epochs": 1, "lr": math.inf}, "--lr is inf"),
        ({"activations": "static", "calibration": "lsq"}, "lsq learns its ranges .* give --qat-epochs too"),
        ({"weight_calibration": "lsq"}, "give --qat-epochs too"),
        ({"weight_calibration": "lsq", "qat_epochs": 1, "symmetric": False, "simulate": True}, "no zero points"),
        ({"method": "gptq", "qat_epochs": 1}, "gptq is of weights that stay"),
        ({"dtype": "fp16", "qat_epochs": 1}, "fp16 is a rounding of every number"),
    ],
)
def test_what_does_not_go_together(options, message):
    with pytest.raises(UserError, match=message):
        QuantConfig(**options)


def test_each_function_says_where_the_other_is(dataset, trained):
    with pytest.raises(UserError, match=r"call qsparse\.quant\.train_quantized"):
        quantize(trained, QuantConfig(qat_epochs=1))
    with pytest.raises(UserError, match="give --qat-epochs"):
        train_quantized(trained, QuantConfig(), dataset, TrainConfig())


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))
    train(TrainConfig(epochs=1, data="mnist-5k", device="cpu"))
    options = ["--activations", "static", "--calibration", "lsq", "--weight-calibration", "lsq"]
    command = [
        "quantize",
        "--dtype",
        "int8",
        *options,
        "--qat-epochs",
        "1",
        "--lr",
        "0.05",
        "--device",
        "cpu",
        "--json",
    ]
    result = CliRunner().invoke(cli.app, command)
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    row = said["rows"][1]
    assert said["saved"] == "runs/1/int8-static-lsq-w_lsq-qat1_lr0.05"
    assert (row["qat_epochs"], row["qat_lr"], row["calibration"], row["weight_calibration"]) == (1, 0.05, "lsq", "lsq")
    assert row["simulated"] is False
    assert row["latency_us"]["1"] > 0
    assert "epoch 1/1" in result.stderr
    saved = load(said["saved"])
    assert saved.fc1.activations == "static"
    assert row["accuracy"] == evaluate(saved, data.load("mnist-5k", None).test)[0]


def test_other_data_and_settings_are_named():
    config, digits = QuantConfig("int4", qat_epochs=1, simulate=True), data.load("mnist-5k")
    for given in (digits.train.images, (digits.train.images, digits.train.labels), None):
        with pytest.raises(TypeError, match=f"data must be a Dataset, .* not {type(given).__name__}"):
            train_quantized(MLP((784, 8, 10)), config, given, TrainConfig())
    with pytest.raises(TypeError, match="train must be a TrainConfig, not dict"):
        train_quantized(MLP((784, 8, 10)), config, digits, {"lr": 0.1})
