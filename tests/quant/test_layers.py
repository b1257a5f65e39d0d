"""A dtype for each layer: what is built, named and measured, and what is refused."""

import json

import pytest
import torch
from typer.testing import CliRunner

from qsparse import checkpoint, cli, load, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear
from qsparse.quant import QuantConfig, quantize
from qsparse.quant.simulate import SimulatedLinear
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

IMAGES = torch.randint(0, 256, (100, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(5))


@pytest.fixture(scope="module")
def model() -> MLP:
    return MLP((784, 40, 30, 10), seed=1)


def test_each_layer_has_its_dtype_and_its_arithmetic(model):
    mixed = quantize(model, QuantConfig("int8", layers={"fc2": "fp16", "fc3": "fp32"}))
    fc1, fc2, fc3 = mixed.layers().values()
    assert isinstance(fc1, QuantLinear)
    assert isinstance(fc2, Linear)
    assert fc2.weight.dtype == torch.float16
    assert torch.equal(fc3.weight, model.fc3.weight)
    x = torch.randn(5, 784)
    whole = {dtype: quantize(model, dtype) for dtype in ("int8", "fp16")}
    expected = model.fc3(whole["fp16"].fc2(whole["int8"].fc1(x).half()).float())
    assert torch.equal(mixed(x), expected)


def test_a_mixed_model_survives_the_disk(model, tmp_path):
    mixed = quantize(model, QuantConfig("fp32", layers={"fc1": "int8", "fc3": "bf16"}))
    checkpoint.save_model(tmp_path / "v", mixed, {"variant": "v"})
    assert torch.equal(load(tmp_path / "v")(IMAGES), mixed(IMAGES))


def test_options_go_to_the_layers_that_have_them(model):
    static = {"activations": "static", "calibration": "minmax"}
    mixed = quantize(model, QuantConfig("int8", layers={"fc1": "fp16"}, **static), IMAGES)
    assert mixed.fc2.activations == mixed.fc3.activations == "static"
    assert torch.equal(mixed.fc2.input_scale, quantize(model, QuantConfig(**static), IMAGES).fc2.input_scale)
    config = QuantConfig("int4", layers={"fc1": "int4wo"}, granularity="group", simulate=True, **static)
    simulated = quantize(model, config, IMAGES)
    assert all(isinstance(layer, SimulatedLinear) for layer in simulated.layers().values())
    assert (simulated.fc1.bits, simulated.fc1.input_scale) == (None, None)
    assert simulated.fc2.bits == 4
    assert simulated.fc2.input_scale is not None
    assert config.of("fc1") == QuantConfig("int4wo", granularity="group", simulate=True)


def test_layers_are_the_same_in_any_order_and_their_names_tell_them_apart():
    one, other = ({"fc1": "int8", "fc2": "fp16"}, {"fc2": "fp16", "fc1": "int8"})
    assert QuantConfig("fp32", layers=one) == QuantConfig("fp32", layers=other)
    assert QuantConfig("fp32", layers=one).variant == "fp32-fc1_int8-fc2_fp16"
    assert QuantConfig("int8", layers={"fc1": "int8"}) == QuantConfig("int8")
    assert hash(QuantConfig("int8", layers={"fc2": "bf16"})) != hash(QuantConfig("int8"))
    assert QuantConfig("int8", layers={"fc2": "bf16"}).fields()["layers"] == {"fc2": "bfloat16"}
    assert QuantConfig("int3", layers={"fc2": "bf16"}, simulate=True).fields()["dtype"] == "int3+bfloat16"
    assert QuantConfig("fp16", layers={"fc2": "bf16"}).fields() == {"layers": {"fc2": "bfloat16"}}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layers": {"fc1": "int9"}}, "Unknown dtype 'int9'; the valid ones are fp32, fp16"),
        ({"dtype": "fp32"}, "Unknown dtype 'fp32'; the valid ones are fp16"),
        ({"dtype": "fp32", "layers": {"fc1": "fp32"}}, "All layers stay fp32"),
        ({"layers": {"fc1": "int3wo"}}, "int3wo has no kernel: add --simulate"),
        ({"dtype": "fp32", "layers": {"fc1": "fp16"}, "granularity": "tensor"}, "fp16 is a rounding of every number"),
        ({"dtype": "fp32", "layers": {"fc1": "int4wo"}, "simulate": True, "activations": "static",
          "calibration": "mse"}, "int4wo leaves the activations as they are"),
    ],
)  # fmt: skip
def test_what_does_not_go_together(options, message):
    with pytest.raises(UserError, match=message):
        QuantConfig(**options)


def test_a_layer_that_is_not_there_lists_the_layers(model):
    with pytest.raises(UserError, match="There is no layer fc9; the layers are fc1, fc2, fc3"):
        quantize(model, QuantConfig("int8", layers={"fc9": "fp16"}))


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["quantize", *arguments, "--device", "cpu", "--json"])


def test_the_command(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", lambda *a, **k: measure(*a, **k, budget_s=0.002, batches=(1,)))
    run = train(TrainConfig(epochs=1, data="mnist-5k", device="cpu")).run
    result = invoke("--layer", "fc1=int8,fc2=fp16")
    assert result.exit_code == 0, result.output
    row = json.loads(result.stdout)["rows"][1]
    assert row["variant"] == "fp32-fc1_int8-fc2_fp16"
    assert row["dtype"] == "int8+float16"
    assert row["layers"] == {"fc1": "int8", "fc2": "float16"}
    assert row["kernel"] == "gemm_int8:cpu (torch._int_mm), gemm:cpu"
    assert row["weight_bytes"] == 784 * 256 + 256 * 8 + 2 * (10 * 256 + 10)
    assert isinstance(load(run / row["variant"]).fc1, QuantLinear)
    for arguments, message in (
        ((), "give --dtype, of all layers, or --layer"),
        (("--layer", "fc1"), "give each layer once, as fc1=int8"),
        (("--layer", "fc1=int8,fc1=fp16"), "give each layer once"),
        (("--layer", "fc7=int8"), "There is no layer fc7; the layers are fc1, fc2"),
        (("--layer", "fc1=int9"), "Unknown dtype 'int9'"),
    ):
        refused = invoke(*arguments)
        assert refused.exit_code == 2
        assert message in refused.stderr
