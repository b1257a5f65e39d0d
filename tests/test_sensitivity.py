"""Each layer alone: what is measured, on which images, and what is refused."""

import json

import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import cli
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear
from qsparse.quant import QuantConfig, quantize
from qsparse.sensitivity import sensitivity
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.run import load_dataset, train


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def test_one_layer_alone_is_quantized():
    model = MLP((784, 20, 15, 10))
    one = quantize(model, QuantConfig("fp32", layers={"fc2": "int8"}))
    assert [type(layer) for layer in one.layers().values()] == [Linear, QuantLinear, Linear]
    x = torch.randn(5, 784)
    hidden = quantize(model, "int8").fc2(model.fc1(x).detach())
    torch.testing.assert_close(one(x), model.fc3(hidden))
    assert quantize(model, QuantConfig("fp32", layers={"fc3": "fp16"}))(x).dtype == torch.float32


def test_each_layer_and_all_on_the_validation_split():
    run = train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", hidden=(32, 16))).run
    result = CliRunner().invoke(cli.app, ["sensitivity", "--dtype", "int8,int2wo", "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    layers = ["fc1", "fc2", "fc3", "all"]
    assert [(row["layer"], row["dtype"]) for row in rows] == [(n, d) for n in layers for d in ("int8", "int2wo")]
    assert [row["simulated"] for row in rows] == [False, True] * 4
    assert [row["weights"] for row in rows[::2]] == [784 * 32, 32 * 16, 160, 784 * 32 + 32 * 16 + 160]
    model, split = qsparse.load(run), load_dataset(run).validation
    base, _ = evaluate(model, split)
    config = QuantConfig("int2wo", simulate=True)
    for row in rows[1::2]:
        alone = QuantConfig("fp32", layers={row["layer"]: "int2wo"}, simulate=True)
        accuracy, _ = evaluate(quantize(model, config if row["layer"] == "all" else alone), split)
        assert (row["accuracy"], row["images"], row["split"]) == (accuracy, 500, "validation")
        assert row["accuracy_change"] == pytest.approx(100 * (accuracy - base))
    assert "simulated" in result.stderr
    assert "on 500 validation images" in " ".join(result.stderr.split())


def test_what_is_refused():
    with pytest.raises(UserError, match="Unknown dtype 'int9'"):
        sensitivity("runs/1", ["int9"])
    with pytest.raises(UserError, match="a dtype at least"):
        sensitivity("runs/1", [])
    with pytest.raises(UserError, match="make one with `qsparse train`"):
        sensitivity(None, ["int8"])
    train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", validation=0))
    with pytest.raises(UserError, match="no validation split to measure on"):
        sensitivity(None, ["int8"], device="cpu")
