"""The tables of experiments/05_quantization are of its rows, the rows are what its configurations name, and exact."""

import dataclasses
import importlib.util
import json
from pathlib import Path

import numpy as np
import pytest
import torch

from qsparse import data
from qsparse.models import MLP
from qsparse.quant import quantize, train_quantized
from qsparse.train.config import TrainConfig
from qsparse.train.fit import fit

HERE = Path(__file__).parents[2] / "experiments" / "05_quantization"


def script(name):
    spec = importlib.util.spec_from_file_location(f"quantization_{name}", HERE / f"{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


RUN, SPEED = script("run"), script("speed")


def test_the_tables_are_of_the_rows():
    rows = [json.loads(line) for line in RUN.ROWS.read_text().splitlines()]
    assert RUN.table(rows) in RUN.README.read_text()
    assert RUN.gains(rows) in RUN.README.read_text()
    names = ["baseline", RUN.TRAINED_ON, *(config.variant for config in RUN.configs())]
    assert [row["variant"] for row in rows] == names * len(RUN.SEEDS)
    for row in rows:
        assert row["simulated"] == ("-sim" in row["variant"])
        assert (row["latency_us"] is None) == row["simulated"]
        assert row.get("oracle_accuracy", row["accuracy"]) == row["accuracy"]
    assert sum("oracle_accuracy" in row for row in rows) == len(RUN.SEEDS) * sum(map(RUN.is_integer, RUN.configs()))


def test_the_speed_table_is_of_its_rows():
    rows = [json.loads(line) for line in SPEED.ROWS.read_text().splitlines()]
    assert SPEED.table(rows) in SPEED.README.read_text()
    assert [row["variant"] for row in rows] == ["baseline", *(config.variant for config in SPEED.CONFIGS)]
    for row in rows[1:]:
        (line,) = (line for line in SPEED.table(rows).splitlines() if line.startswith(f"| {row['variant']} |"))
        assert line.count("slower") == sum(speedup < 1 for speedup in row["speedup"].values())


INTEGERS = [config for config in RUN.configs() if RUN.is_integer(config)]


@pytest.fixture(scope="module")
def trained():
    dataset, config = data.load("mnist-5k", None), TrainConfig(epochs=1)
    model = MLP((784, 256, 10), seed=0)
    fit(model, dataset, config)
    return model, dataset, config


@pytest.mark.parametrize("config", INTEGERS, ids=lambda config: config.variant)
def test_the_integer_path_is_its_oracle(trained, config):
    """Of each set of options that the experiment has, on some test images; the experiment does it on all 10,000."""
    model, dataset, train = trained
    if config.qat_epochs:
        quantized = train_quantized(model, dataclasses.replace(config, qat_epochs=1), dataset, train)
    else:
        quantized = quantize(model, config, dataset.validation.images if config.needs_data else None)
    images = dataset.test.images[:150]
    with torch.inference_mode():
        np.testing.assert_array_equal(quantized(images).numpy(), RUN.by_oracle(quantized, images))
