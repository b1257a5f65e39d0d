"""`qsparse quantize` with its options: from a run to rows."""

import functools
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console
from typer.testing import CliRunner

import qsparse
from qsparse import checkpoint, cli, variants
from qsparse.collect import collect
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.quant import QuantConfig, quantize
from qsparse.report import show
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.run import load_dataset, train


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1, 64)))


@pytest.fixture
def run() -> Path:
    return train(TrainConfig(epochs=1, data="mnist-5k", device="cpu")).run


def invoke(*arguments) -> dict:
    result = CliRunner().invoke(cli.app, [*map(str, arguments), "--device", "cpu", "--json"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


def test_the_options_left_out_are_those_of_the_config(run):
    assert invoke("quantize", "--dtype", "int8")["variant"] == QuantConfig().variant
    said = invoke("quantize", "--dtype", "int8", "--activations", "static", "--calibration", "percentile")
    row = said["rows"][1]
    assert row["percentile"] == QuantConfig.percentile
    assert row["calibration_samples"] == QuantConfig.calibration_samples
    assert said["variant"] == "int8-static-percentile99.99"


def test_a_static_variant_is_saved_and_its_row_is_its_own(run):
    said = invoke("quantize", "--dtype", "int8", "--activations", "static", "--calibration", "mse",
                  "--calibration-samples", 100, "--granularity", "tensor")  # fmt: skip
    assert said["saved"] == "runs/1/int8-static-mse-tensor-n100"
    row = said["rows"][1]
    assert (row["activations"], row["calibration"], row["method"]) == ("static", "mse", "absmax")
    assert (row["granularity"], row["calibration_samples"], row["simulated"]) == ("tensor", 100, False)
    test = load_dataset(run).test
    saved = qsparse.load(said["saved"])
    assert row["accuracy"] == evaluate(saved, test)[0]
    assert row["latency_us"]["64"] > 0
    assert row["weight_bytes"] == 203_264 + 8 * 266 + 2 * 4


def test_calibration_looks_at_the_validation_split(run):
    options = QuantConfig(activations="static", calibration="minmax")
    saved = qsparse.load(variants.quantize_run(run, options, device="cpu").directory)
    validation = load_dataset(run).validation.images
    expected = quantize(qsparse.load(run), options, validation)
    assert torch.equal(saved.fc2.input_scale, expected.fc2.input_scale)


def test_a_fixed_range_of_negative_numbers_parses(run):
    said = invoke("quantize", "--dtype", "int8", "--activations", "static", "--calibration", "fixed",
                  "--range", "-10", "10")  # fmt: skip
    assert said["variant"] == "int8-static-fixed_-10_10"
    assert said["rows"][1]["range"] == [-10, 10]
    assert qsparse.load(said["saved"]).fc1.input_scale == torch.tensor(10.0) / 127


def test_without_a_validation_split_it_is_refused():
    run = train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", validation=0)).run
    with pytest.raises(UserError, match=r"train with --validation above 0"):
        variants.quantize_run(run, QuantConfig(activations="static", calibration="minmax"), device="cpu")
    assert [path.name for path in run.iterdir() if path.is_dir()] == []


def test_a_simulation_has_an_accuracy_and_nothing_else(run, tmp_path):
    said = invoke("quantize", "--dtype", "int4wo", "--simulate", "--granularity", "group", "--group", 32)
    assert (said["variant"], said["saved"]) == ("int4wo-sim-g32", None)
    assert [path.name for path in run.iterdir() if path.is_dir()] == []
    baseline, row = said["rows"]
    assert row["simulated"] is True
    assert (row["dtype"], row["granularity"], row["group"], row["activations"]) == ("int4wo", "group", 32, None)
    assert row["kernel"] == "simulated in float32"
    model = quantize(qsparse.load(run), QuantConfig("int4wo", granularity="group", group=32, simulate=True))
    assert row["accuracy"] == evaluate(model, load_dataset(run).test)[0]
    for field in ("latency_us", "latency_us_p10", "latency_us_p90", "speedup", "repetitions", "timer", "l2",
                  "weight_bytes", "weight_ratio", "file_bytes", "peak_bytes"):  # fmt: skip
        assert row[field] is None, field
    assert baseline["simulated"] is False
    assert baseline["latency_us"]["1"] > 0

    collected = collect([run])
    assert collected.picture.exists()
    with open(tmp_path / "table", "w") as file:
        show(collected.rows, file)
    text = (tmp_path / "table").read_text()
    assert "simulated" in text
    assert "No kernel ran: no time, no bytes." in text


def test_what_calibration_warns_of_is_said_aloud(run, capsys):
    model = qsparse.load(run)
    with torch.no_grad():
        model.fc1.weight.zero_()
        model.fc1.bias.fill_(-1)
    checkpoint.write_weights(run, model)
    options = QuantConfig(activations="static", calibration="minmax")
    variants.quantize_run(run, options, device="cpu", console=Console(stderr=True, width=200))
    assert "warning: Calibration of layer fc2: only zeros were seen" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("--dtype int4", "int4 has no kernel: add --simulate"),
        ("--dtype int8 --activations static", "give --calibration, one of minmax"),
        ("--dtype int8 --calibration minmax", "give --activations static too"),
        ("--dtype int8 --activations static --calibration fixed --range 3 2", "LO must be below HI"),
    ],
)
def test_mistakes_are_sentences(options, message):
    result = CliRunner().invoke(cli.app, ["quantize", *options.split()])
    assert result.exit_code == 2
    assert message in result.stderr


def test_a_sweep_is_one_table_of_all_combinations(run):
    said = invoke("quantize", "--dtype", "int8", "--activations", "static", "--calibration-samples", 50,
                  "--sweep", "calibration=minmax,percentile", "--sweep", "percentile=99,100", "--simulate")  # fmt: skip
    names = ["int8-sim-static-minmax-n50", "int8-sim-static-percentile99-n50", "int8-sim-static-percentile100-n50"]
    assert [row["variant"] for row in said["rows"]] == ["baseline", *names]
    assert said["saved"] == dict.fromkeys(names)
    said = invoke("quantize", "--dtype", "int8", "--sweep", "granularity=tensor,channel")
    assert said["saved"] == {"int8-tensor": "runs/1/int8-tensor", "int8": "runs/1/int8"}
    assert [row["weight_bytes"] for row in said["rows"][1:]] == [203_264 + 8 * 266] * 2
    assert len(checkpoint.read_rows(run)) == 4 + 3
