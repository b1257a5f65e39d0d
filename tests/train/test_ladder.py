"""The ladder: what it measures, and that a wrong backend gets no time."""

import io
import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from qsparse import cli, data
from qsparse.device import missing_for_cuda
from qsparse.errors import UserError
from qsparse.train import ladder as rungs
from qsparse.train import numpy_backend
from qsparse.train.config import TrainConfig
from qsparse.train.ladder import ladder, runnable, show

CONFIG = TrainConfig(hidden=(16,), epochs=2)


@pytest.fixture(autouse=True)
def without_a_gpu(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(rungs, "missing_for_cuda", lambda: "there is no GPU")


def climb(*arguments: object):
    options = ("--data", "mnist-5k", "--hidden", 16, "--epochs", 1, *arguments)
    return CliRunner().invoke(cli.app, ["ladder", *map(str, options)])


def test_a_row_for_each_backend_in_json_and_in_a_file():
    for _ in range(2):
        result = climb("--rounds", 1, "--json", "--out", "rows.jsonl")
        assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    assert [json.loads(line) for line in Path("rows.jsonl").read_text().splitlines()][3:] == rows
    assert [row["backend"] for row in rows] == ["torch", "numpy", "c"]
    assert "cuda is left out: there is no GPU" in result.stderr
    for row in rows:
        assert (row["op"], row["sizes"], row["images"], row["timer"]) == ("train", [784, 16, 10], 4000, "wall")
        assert row["loss_error"] < 1e-3
        assert row["images_per_s"] == pytest.approx(4000 / row["epoch_s"])
        assert row["ratio"] == pytest.approx(rows[0]["epoch_s"] / row["epoch_s"])
        assert row["accuracy"] == pytest.approx(rows[0]["accuracy"], abs=0.01)
        assert row["accuracy"] > 0.7
        assert row["eager_s"] is row["eager_ratio"] is None  # PyTorch on a GPU
    assert rows[0]["ratio"] == 1
    assert rows[1]["loss_error"] > 0  # they were two computations


def test_each_backend_trains_in_every_round_in_turn(monkeypatch):
    trained = []
    real = rungs.fit

    def fit(model, dataset, config, **rest):
        trained.append((config.backend, len(dataset.train)))
        return real(model, dataset, config, **rest)

    monkeypatch.setattr(rungs, "fit", fit)
    measured = ladder(data.load("mnist-5k", 3500), CONFIG, rounds=2, say=lambda _: None)
    names = ["torch", "numpy", "c"]
    assert trained == [(name, 256) for name in names] + [(name, 500) for name in names] * 2
    assert measured.wrong == []


@pytest.mark.parametrize("mistake", ["gradient", "loss"])
def test_a_backend_with_other_losses_gets_no_time_and_the_exit_code_says_so(monkeypatch, mistake):
    right = numpy_backend.softmax_cross_entropy

    def wrong(logits, labels):
        loss, gradient = right(logits, labels)
        return (loss, gradient * 1.5) if mistake == "gradient" else (loss * 1.01, gradient)

    monkeypatch.setattr(numpy_backend, "softmax_cross_entropy", wrong)
    result = climb("--rounds", 1, "--json")
    assert result.exit_code == 1
    found = json.loads(result.stdout)
    assert found["wrong"] == ["numpy"]
    row = found["rows"][1]
    assert row["epoch_s"] is row["ratio"] is row["images_per_s"] is None
    assert "wrong by" in result.stderr


def test_without_a_compiler_c_is_left_out_and_said(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("CC", raising=False)
    said = []
    assert runnable("auto", said.append) == ["torch", "numpy"]
    assert "c is left out: --backend c needs a C compiler" in said[0]


def test_rungs_can_be_left_out():
    measured = ladder(data.load("mnist-5k", 3500), CONFIG, rounds=1, say=lambda _: None, without=["numpy", "c"])
    assert [row["backend"] for row in measured.rows] == ["torch"]
    with pytest.raises(ValueError, match="torch is what others are compared with"):
        ladder(data.load("mnist-5k", 3500), CONFIG, rounds=1, say=lambda _: None, without=["torch"])


def test_the_table_names_the_ratio():
    measured = ladder(data.load("mnist-5k", 3500), CONFIG, rounds=1, say=lambda _: None)
    text = io.StringIO()
    show(measured.rows, text)
    assert "1.00x" in text.getvalue()
    assert "784-16-10, batch 64, 500 images of mnist-5k." in text.getvalue()
    assert max(map(len, text.getvalue().splitlines())) <= 80


@pytest.fixture
def with_a_gpu(monkeypatch):
    monkeypatch.setattr(rungs, "missing_for_cuda", missing_for_cuda)


@pytest.mark.gpu
def test_the_rungs_of_a_gpu(with_a_gpu):
    result = climb("--device", "cuda", "--rounds", 1, "--json")
    assert result.exit_code == 0, result.output
    rows = json.loads(result.stdout)["rows"]
    eager, graph, bf16, *ours = (row["backend"] for row in rows)
    assert (eager, graph, bf16) == ("torch_eager", "torch_graph", "torch_graph_bf16")
    assert ours == ["cuda", "cuda_tf32", "cuda_bf16"]
    assert [row["dtype"] for row in rows] == ["tf32", "tf32", "bfloat16", "float32", "tf32", "bfloat16"]
    for row in rows:
        same = rows[2 if row["dtype"] == "bfloat16" else 1]
        assert (row["device"], row["peer"], row["peer_device"]) == ("cuda", same["backend"], "cuda")
        assert row["ratio"] == pytest.approx(same["epoch_s"] / row["epoch_s"])
        if same is rows[1]:
            assert row["eager_ratio"] == pytest.approx(rows[0]["epoch_s"] / row["epoch_s"])
        else:
            assert row["eager_ratio"] is None
        assert row["accuracy"] == pytest.approx(rows[3]["accuracy"], abs=0.03)


def test_a_gpu_that_is_not_there_is_refused():
    result = climb("--device", "cuda")
    assert isinstance(result.exception, UserError) or "there is no GPU" in result.output


def test_the_first_steps_alone_are_compared_where_pytorch_is_no_rung():
    reference = rungs._rung("torch", data.load("mnist-5k"), TrainConfig(hidden=(16,), epochs=3, batch_size=16))
    reference.compare()
    whole = rungs._rung("torch", data.load("mnist-5k"), TrainConfig(hidden=(16,), epochs=3, batch_size=16))
    whole.run()
    assert len(reference.losses) == rungs.COMPARED_STEPS // 50
    assert reference.losses == whole.losses
    assert reference.seconds == []
