"""Each layer alone: what is measured, on which images, and what is refused."""

import functools
import json
import math

import matplotlib.image
import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import cli, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear, SparseLinear
from qsparse.quant import QuantConfig, quantize
from qsparse.report.heat import heat_map
from qsparse.sensitivity import Budget, Chosen, sensitivity
from qsparse.sparse import SparseConfig, prune, sparsify
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
    assert (run / "sensitivity.png").read_bytes().startswith(b"\x89PNG")


def test_what_is_refused():
    with pytest.raises(UserError, match="Unknown dtype 'int9'"):
        sensitivity("runs/1", ["int9"])
    with pytest.raises(UserError, match="a dtype or a density at least"):
        sensitivity("runs/1", [])
    with pytest.raises(UserError, match="The density must be above 0 and at most 1"):
        sensitivity("runs/1", [], [0])
    with pytest.raises(UserError, match="give one of --budget-bytes and --budget-drop"):
        Budget()
    with pytest.raises(UserError, match="give one of --budget-bytes and --budget-drop"):
        Budget(5, 0.1)
    with pytest.raises(UserError, match="--budget-drop is -1"):
        Budget(drop=-1)
    with pytest.raises(UserError, match="--budget-drop is nan"):
        Budget(drop=math.nan)
    with pytest.raises(UserError, match="A budget is of what kernels compute: give --dtype one of fp16, bf16, int8"):
        sensitivity("runs/1", ["int2wo"], allowed=Budget(bytes=100))
    with pytest.raises(UserError, match="make one with `qsparse train`"):
        sensitivity(None, ["int8"])
    train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", validation=0))
    with pytest.raises(UserError, match="no validation split to measure on"):
        sensitivity(None, ["int8"], device="cpu")


def invoke(*arguments):
    return CliRunner().invoke(cli.app, ["sensitivity", *map(str, arguments), "--device", "cpu", "--json"])


def test_densities_and_bytes():
    run = train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", hidden=(32,))).run
    result = invoke("--dtype", "int8,int4wo,int3wo", "--density", "0.5,0.1", "--out", "heat.png")
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["png"] == "heat.png"
    assert (said["chosen"], said["saved"], said["measured"]) == (None, None, None)
    rows = {(row["layer"], row["choice"]): row for row in said["rows"]}
    assert len(rows) == 3 * 5
    assert rows["fc1", "csr-0.1"]["density"] == 0.1
    assert rows["fc1", "csr-0.1"]["dtype"] == "float32"
    assert rows["fc2", "int8"]["bytes"] == 320 + 10 * 8
    assert rows["fc2", "int8"]["float32_bytes"] == 4 * 330
    assert rows["fc1", "int4wo"]["bytes"] == 784 * 16 + 32 * 6
    assert rows["fc1", "int3wo"]["bytes"] is None
    assert rows["all", "csr-0.5"]["bytes"] == sum(rows[name, "csr-0.5"]["bytes"] for name in ("fc1", "fc2"))
    model, split = qsparse.load(run), load_dataset(run).validation
    sparse = sparsify(*prune(model, SparseConfig(0.1, distribution="uniform")))
    alone = model.replace({"fc2": sparse.fc2})
    assert isinstance(alone.fc2, SparseLinear)
    assert rows["fc2", "csr-0.1"]["accuracy"] == evaluate(alone, split)[0]
    assert rows["all", "csr-0.1"]["accuracy"] == evaluate(sparse, split)[0]


def test_a_budget_chooses_saves_and_measures(monkeypatch):
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))
    run = train(TrainConfig(epochs=1, data="mnist-5k", device="cpu", hidden=(32,))).run
    model, split = qsparse.load(run), load_dataset(run).validation
    base = evaluate(model, split)[0]
    for budget in (("--budget-bytes", 60_000), ("--budget-drop", 0.4)):
        result = invoke("--dtype", "fp16,int8,int4wo", *budget)
        assert result.exit_code == 0, result.output
        said = json.loads(result.stdout)
        chosen, row = said["chosen"], said["measured"][1]
        found = qsparse.load(said["saved"])
        dtypes = chosen["layers"]
        if len(set(dtypes.values())) > 1:
            assert row["layers"] == {name: dtype for name, dtype in dtypes.items() if dtype != "fp32"}
        else:
            assert row["variant"] == dtypes["fc1"]
        assert row["weight_bytes"] == chosen["bytes"] < 4 * 25_450
        assert chosen["change"] == pytest.approx(100 * (evaluate(found, split)[0] - base))
        if budget[0] == "--budget-bytes":
            assert chosen["bytes"] <= 60_000
        else:
            assert chosen["change"] >= -0.4
        assert "chosen: fc1=" in result.stderr
    result = invoke("--dtype", "int8", "--budget-bytes", 100)
    assert result.exit_code == 2
    assert "--budget-bytes is 100: the smallest of these dtypes takes" in result.stderr
    assert invoke("--dtype", "int8", "--density", "many").exit_code == 2


def test_what_is_chosen_is_one_dtype_where_it_can_be():
    assert Chosen({"fc1": "int8", "fc2": "int8"}, 0, 0, 0).config == QuantConfig("int8")
    assert Chosen({"fc1": "fp32", "fc2": "fp32"}, 0, 0, 0).config is None
    assert Chosen({"fc1": "fp32", "fc2": "fp16"}, 0, 0, 0).config == QuantConfig("fp32", layers={"fc2": "fp16"})


def test_a_heat_map_of_any_rows(tmp_path):
    def row(layer, choice, change, size):
        return {"layer": layer, "choice": choice, "accuracy_change": change, "bytes": size, "images": 7,
                "simulated": size is None}  # fmt: skip

    rows = [row(f"fc{i}", f"int{b}", -(10.0 ** (i - b)), None if b < 4 else 10**i) for i in (1, 2) for b in (2, 4, 8)]
    path = heat_map(rows, tmp_path / "heat.png")
    image = matplotlib.image.imread(path)
    assert image[..., :3].std() > 0.05
    assert [file.name for file in tmp_path.iterdir()] == ["heat.png"]
    heat_map([row("fc1", "int8", 0.0, 5)], path)
    with pytest.raises(UserError, match="Cannot write the picture"):
        heat_map(rows, tmp_path / "nowhere" / "heat.png")


def test_the_heat_map_takes_no_other_file_s_place(tmp_path):
    (tmp_path / "config.json").write_text("mine")
    result = CliRunner().invoke(cli.app, ["sensitivity", "--out", str(tmp_path / "config.json")])
    assert (result.exit_code, result.stdout) == (2, "")
    assert "is no picture: give it a name that ends in .png" in result.stderr
    assert (tmp_path / "config.json").read_text() == "mine"
    result = CliRunner().invoke(cli.app, ["sensitivity", "--out", str(tmp_path / "config.json" / "heat.png")])
    assert result.stderr.startswith("Error: cannot make the directory")
