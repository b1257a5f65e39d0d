import json

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli
from qsparse.bench import harness, mlp
from qsparse.bench.command import WRONG
from qsparse.models import MLP

CPU = torch.device("cpu")
SIZES = (20, 17, 12, 10)
SMALL = ["--device", "cpu", "--network", "20,17,12,10", "--batch", "3"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "mlp", *arguments])


def test_rows_say_which_network_and_batch_and_survive_json():
    result = mlp.bench(CPU, networks=[SIZES, (20, 8, 10)], batches=[1, 5])
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"] == result.rows
    assert not result.wrong
    assert [(row["sizes"], row["batch"]) for row in result.rows[::3]] == [
        ([20, 17, 12, 10], 1),
        ([20, 17, 12, 10], 5),
        ([20, 8, 10], 1),
        ([20, 8, 10], 5),
    ]
    for row in result.rows:
        assert row["op"] == "mlp"
        assert row["shape"] == [row["batch"], 10, 20]
        assert row["peer"] == "torch_fp32"
        assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["error"] == 0 or row["dtype"] == "int8wo"
    assert [(row["dtype"], row["activations"]) for row in result.rows[:3]] == [
        ("int8", "dynamic"),
        ("int8", "static"),
        ("int8wo", None),
    ]


@pytest.mark.parametrize("batch", [1, 7])
def test_what_is_right_is_what_the_model_computes_bit_for_bit(normal, batch):
    dense = MLP(SIZES, seed=3)
    x, calibration = normal(batch, SIZES[0]), normal(64, SIZES[0])
    with torch.inference_mode():
        found = mlp.networks(dense, x, calibration)
        for each in found[:2]:
            assert torch.equal(each.model(x).double(), each.expected.values)
        exact = mlp._logits([(layer.weight, layer.bias) for layer in dense.layers().values()], x)
        assert torch.equal(exact.float(), dense(x)) or torch.allclose(exact.float(), dense(x), rtol=1e-5, atol=1e-6)
        for each in found:
            assert (each.expected.values - exact).norm() < 0.05 * exact.norm()


def test_a_network_with_a_wrong_bit_is_not_timed(monkeypatch, tmp_path):
    right = MLP.forward

    def almost(self, x):
        y = right(self, x).clone()
        y.view(torch.int32)[-1, -1] += 1
        return y

    monkeypatch.setattr(MLP, "forward", almost)
    out = tmp_path / "rows.jsonl"
    result = run(*SMALL, "--json", "--out", str(out))
    assert result.exit_code == WRONG
    found = json.loads(result.stdout)
    assert [json.loads(line) for line in out.read_text().splitlines()] == found["rows"]
    assert [row["us"] is None for row in found["rows"]] == [True, True, False]
    assert found["cells"][0]["ratio"]["int8 dynamic"] is None
    assert found["means"]["int8 static"]["ratio"] is None
    assert "WRONG: not the outputs" in result.stderr


def test_the_footnote_of_wrong_networks_stands_where_there_are_some():
    result = run(*SMALL)
    assert result.exit_code == 0, result.stderr
    assert "the fastest peer" in result.stdout
    assert "WRONG" not in result.stdout


def test_compiled_peers_are_refused_on_a_cpu():
    result = run(*SMALL, "--compile", "default")
    assert result.exit_code == 2
    assert "--compile is of the peers on a GPU" in result.stderr


def make_row(batch, peer, peer_us, us, activations="dynamic", **fields):
    row = {"sizes": [784, 256, 10], "batch": batch, "dtype": "int8", "activations": activations}
    return row | {"peer": peer, "peer_us": peer_us, "us": us} | fields


def test_the_ratio_of_a_cell_is_that_of_the_fastest_peer():
    rows = [
        make_row(1, "torch_fp16_graph", 12.0, 6.0),
        make_row(1, "torchao_int8wo", 9.0, 6.0),
        make_row(1, "torch_fp16_graph", 12.0, 4.5, "static"),
        make_row(1, "torchao_int8wo", 9.0, 4.5, "static"),
        make_row(64, "torch_fp16_graph", 14.0, 20.0),
        make_row(64, "torchao", None, 20.0),
        make_row(64, "torch_fp16_graph", 14.0, None, "static"),
    ]
    first, second = mlp.cells(rows)
    assert (first["best_peer"], first["ratio"]) == ("torchao_int8wo", {"int8 dynamic": 1.5, "int8 static": 2.0})
    assert (second["best_peer"], second["ratio"]) == ("torch_fp16_graph", {"int8 dynamic": 0.7, "int8 static": None})
    assert mlp.means([first, second]) == {
        "int8 dynamic": {"cells": 2, "ratio": pytest.approx((1.5 * 0.7) ** 0.5, abs=1e-4), "worst_ratio": 0.7},
        "int8 static": {"cells": 2, "ratio": None, "worst_ratio": 2.0},
    }


def test_the_table_has_a_line_for_each_cell_and_marks_the_fastest_peer():
    result = run(*SMALL, "--batch", "1")
    assert result.exit_code == 0
    lines = [line for line in result.stdout.splitlines() if line.strip().startswith("20-17-12-10")]
    assert len(lines) == 2
    assert all("*" in line for line in lines)
    assert "geometric mean" in result.stdout


@pytest.mark.parametrize("arguments", [["--network", "784"], ["--network", "784,0,10"], ["--batch", "0"]])
def test_what_does_not_serve_is_refused_before_anything_runs(arguments):
    result = run("--device", "cpu", *arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


@pytest.mark.gpu
def test_a_run_on_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    result = mlp.bench(device, networks=[(784, 256, 10)], batches=[64], repetitions=10)
    assert not result.wrong
    (cell,) = result.cells
    assert cell["best_peer"] == "torch_fp16_graph"
    assert set(cell["us"]) == {"int8 dynamic", "int8 static", "int8wo"}
    for row in result.rows:
        assert row["us"] > 0
        assert row["tier"] != "cpu"
        assert row["launches"]


def test_a_batch_that_no_int32_holds_is_refused():
    result = CliRunner().invoke(cli.app, ["bench", "mlp", "--network", "4,2", "--batch", str(2**31)])
    assert result.exit_code == 2
    assert "--batch is 2147483648" in result.stderr
