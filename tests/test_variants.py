"""A run in, a compressed model and its rows out."""

import functools
import json
import math
import warnings
from pathlib import Path

import pytest
import torch
from rich.console import Console

import qsparse
from qsparse import checkpoint, data, variants
from qsparse.collect import collect
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse import EmptyLayerWarning
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.run import load_dataset, train
from qsparse.variants import quantize_run, sparsify_run


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1, 64)))


@pytest.fixture
def run() -> Path:
    """A run of the default network on the 5,000 digits."""
    return train(TrainConfig(epochs=3, data="mnist-5k", device="cpu", momentum=0.5, weight_decay=1e-4)).run


@pytest.mark.parametrize("dtype", ["fp16", "bf16", "int8"])
def test_quantize_saves_what_it_measured(run, dtype):
    result = quantize_run(run, dtype, device="cpu")
    assert (result.run, result.variant, result.directory) == (run, dtype, run / dtype)
    assert [row["variant"] for row in result.rows] == ["baseline", dtype]
    assert checkpoint.read_rows(run) == json.loads(json.dumps(result.rows))
    baseline, row = result.rows
    test = load_dataset(run).test
    accuracy, predictions = evaluate(qsparse.load(run / dtype), test)
    assert row["accuracy"] == accuracy
    assert row["agreement"] == (predictions == evaluate(qsparse.load(run), test)[1]).double().mean().item()
    assert baseline["accuracy"] == checkpoint.read_metrics(run)[-1]["test_accuracy"]
    assert row["file_bytes"] == (run / dtype / "model.safetensors").stat().st_size
    assert baseline["file_bytes"] == (run / "model.safetensors").stat().st_size
    assert row["weight_bytes"] < 0.51 * baseline["weight_bytes"]
    assert (row["run"], row["seed"], row["simulated"]) == ("runs/1", 0, False)
    config = json.loads((run / dtype / "config.json").read_text())
    assert (config["run"], config["variant"]) == ("runs/1", dtype)


@pytest.mark.parametrize("format", ["csr", "coo"])
def test_sparsify_keeps_the_asked_density(run, format):
    result = sparsify_run(None, 0.1, format, device="cpu")
    assert result.directory == run / f"{format}-0.1"
    row = result.rows[1]
    assert row["density"] == pytest.approx(0.1, abs=1e-5)
    assert (row["density_asked"], row["format"], row["finetune_epochs"]) == (0.1, format, 0)
    assert row["method"] == "magnitude"
    sparse = qsparse.load(result.directory)
    assert sum(layer.nnz for layer in sparse.layers().values()) == round(0.1 * (784 * 256 + 256 * 10))
    assert row["accuracy"] == evaluate(sparse, load_dataset(run).test)[0]


def test_finetuning_trains_the_weights_that_stay_and_no_others(run):
    pruned = qsparse.load(sparsify_run(run, 0.05, "csr", device="cpu").directory)
    result = sparsify_run(run, 0.05, "csr", finetune_epochs=2, lr=0.05, device="cpu")
    tuned = qsparse.load(result.directory)
    assert result.directory == run / "csr-0.05-ft2"
    for name, layer in tuned.layers().items():
        before = pruned.layers()[name]
        assert torch.equal(layer.col_indices, before.col_indices)
        assert torch.equal(layer.row_offsets, before.row_offsets)
        assert (layer.values != before.values).float().mean() > 0.9
    row = result.rows[1]
    assert (row["finetune_epochs"], row["finetune_lr"]) == (2, 0.05)
    assert row["accuracy"] > checkpoint.read_rows(run)[1]["accuracy"]
    assert result.rows[0]["accuracy"] == checkpoint.read_metrics(run)[-1]["test_accuracy"]


def test_finetuning_goes_on_at_the_rate_of_the_run_unless_told(run):
    row = sparsify_run(run, 0.5, "coo", finetune_epochs=1, device="cpu").rows[1]
    assert row["finetune_lr"] == TrainConfig().lr


def test_a_layer_that_is_emptied_is_said_aloud(run, capsys):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sparsify_run(run, 1e-5, "csr", device="cpu", console=Console(stderr=True))
    said = capsys.readouterr().err
    assert "warning: " in said
    assert "layer fc" in said
    assert EmptyLayerWarning.__name__ not in said


def test_a_peer_without_a_row_is_said_aloud(run, capsys, monkeypatch):
    broken = torch.nn.Sequential(torch.nn.Linear(784, 10))
    torch.nn.init.constant_(broken[0].weight, 3e38)
    monkeypatch.setattr("qsparse.measure._torch_peers", lambda *_: {"torch_fp16_graph": broken})
    rows = quantize_run(run, "int8", device="cpu", console=Console(stderr=True)).rows
    assert [row["variant"] for row in rows] == ["baseline", "int8"]
    assert "warning: The outputs of torch_fp16_graph are NaN or Inf" in capsys.readouterr().err


def test_compressing_again_replaces_the_variant_and_adds_rows(run):
    quantize_run(run, "int8", device="cpu")
    before = (run / "int8" / "model.safetensors").read_bytes()
    quantize_run(run, "int8", device="cpu")
    assert (run / "int8" / "model.safetensors").read_bytes() == before
    assert [row["variant"] for row in checkpoint.read_rows(run)] == ["baseline", "int8"] * 2


@pytest.mark.parametrize("density", [0.0, -0.1, 1.0001, math.nan, math.inf])
def test_a_density_outside_its_range_is_refused_before_anything_is_read(density):
    with pytest.raises(UserError, match="density"):
        sparsify_run("runs/1", density)


def test_other_bad_settings_are_refused_before_anything_is_read():
    with pytest.raises(UserError, match="Unknown dtype 'int9'; the valid ones are fp16, bf16, int8"):
        quantize_run("runs/1", "int9")
    with pytest.raises(UserError, match="unknown format 'bsr': choose one of csr, coo"):
        sparsify_run("runs/1", 0.1, "bsr")
    with pytest.raises(UserError, match="2:4 stores 2 of each 4 weights"):
        sparsify_run("runs/1", 0.1, "2:4")
    for count in (-1, 1.5, "1", True):
        with pytest.raises(UserError, match=f"--finetune-epochs is {count!r}: it must be a whole number"):
            sparsify_run("runs/1", 0.1, finetune_epochs=count)
        with pytest.raises(UserError, match=f"--epochs is {count!r}: it must be a whole number"):
            sparsify_run("runs/1", 0.1, schedule="gradual", epochs=count)
    for seed in (False, 0.0, ""):
        with pytest.raises(UserError, match=f"seed is {seed!r}: it must be a whole number"):
            sparsify_run("runs/1", 0.1, pruner="random", seed=seed)
    with pytest.raises(UserError, match="--lr is nan"):
        sparsify_run("runs/1", 0.1, finetune_epochs=1, lr=math.nan)


def test_no_run_names_the_command():
    with pytest.raises(UserError, match="make one with `qsparse train`"):
        quantize_run(None, "int8")


def test_an_unfinished_run_is_refused(run):
    (run / "model.safetensors").unlink()
    with pytest.raises(UserError, match=r"not done \(3 of 3 epochs\): finish it with"):
        quantize_run(run, "int8", device="cpu")


def test_a_variant_is_no_run(run):
    quantize_run(run, "int8", device="cpu")
    with pytest.raises(UserError, match="give its run, runs/1"):
        quantize_run(run / "int8", "fp16", device="cpu")


def test_a_run_on_other_data_is_refused_and_nothing_is_written(run, monkeypatch):
    before = sorted(path.name for path in run.iterdir())
    other = data.load("mnist-5k", 100)
    monkeypatch.setattr(data, "load", lambda *_: other)
    with pytest.raises(UserError, match="was trained on other data"):
        quantize_run(run, "int8", device="cpu")
    assert sorted(path.name for path in run.iterdir()) == before


def test_a_diverged_model_gets_no_variant(run):
    model = MLP((784, 256, 10))
    with torch.no_grad():
        model.fc1.weight[0, 0] = math.nan
    checkpoint.write_weights(run, model)
    with pytest.raises(UserError, match="layer fc1 holds NaN"):
        quantize_run(run, "int8", device="cpu")
    assert not (run / "int8").exists()


@pytest.mark.gpu
def test_the_rows_of_a_gpu_stand_beside_its_peers(run):
    for result in (
        quantize_run(run, "int8", device="cuda"),
        sparsify_run(run, 0.1, "csr", finetune_epochs=1, device="cuda"),
    ):
        assert {row["peer"] for row in result.rows} >= {None, "torch_fp32_graph", "torch_fp16_graph"}
        assert all(row["device"].startswith("cuda") for row in result.rows)
        _, predictions = evaluate(qsparse.load(result.directory), load_dataset(run).test)
        _, on_gpu = evaluate(qsparse.load(result.directory, "cuda"), load_dataset(run).to("cuda").test)
        assert (predictions == on_gpu.cpu()).double().mean() > 0.998


# Reports


def test_collect_takes_the_newest_row_of_each_variant(run):
    for dtype in ("int8", "fp16", "int8"):
        quantize_run(run, dtype, device="cpu")
    collected = collect([run])
    assert sorted(row["variant"] for row in collected.rows) == ["baseline", "fp16", "int8"]
    assert collected.picture == run / "report.png"
    assert collected.picture.read_bytes().startswith(b"\x89PNG")
    json.dumps(collected.to_json(), allow_nan=False)


def test_collect_takes_a_run_once_however_it_is_spelt(run):
    checkpoint.append_rows(run, [{"variant": "baseline", "accuracy": 0.5}])
    Path("link").symlink_to(run)
    for spellings in ([run, run.absolute()], [run, "link", "./runs/../runs/1"]):
        assert len(collect(spellings).rows) == 1


def test_collect_names_the_line_of_a_foreign_row(run):
    checkpoint.append_rows(run, [{"variant": "baseline", "accuracy": 0.5}, {"accuracy": "high"}])
    with pytest.raises(UserError, match=r"rows\.jsonl: line 2 is no row of qsparse's, accuracy is no number; delete"):
        collect([run])
    assert not (run / "report.png").exists()


def test_collect_takes_every_run_and_says_which_have_no_rows(run, capsys):
    quantize_run(run, "int8", device="cpu")
    other = train(TrainConfig(hidden=(), epochs=1, data="mnist-5k", device="cpu")).run
    collected = collect(console=Console(stderr=True))
    assert {row["run"] for row in collected.rows} == {"runs/1"}
    assert collected.picture == Path("runs/report.png")  # not the absolute path, which is longer
    assert f"{other}: nothing was measured yet" in capsys.readouterr().err
    sparsify_run(other, 0.5, device="cpu")
    assert {row["run"] for row in collect().rows} == {"runs/1", "runs/2"}
    assert {row["run"] for row in collect([other, other]).rows} == {"runs/2"}


def test_a_run_that_was_moved_reports_under_its_new_name(run):
    quantize_run(run, "int8", device="cpu")
    run.rename("moved")
    assert {row["run"] for row in collect(["moved"], out="deep/er/a.PNG").rows} == {"moved"}
    assert Path("deep/er/a.PNG").exists()


def test_what_collect_refuses(run):
    with pytest.raises(UserError, match="nothing was measured yet in runs/1: run `qsparse quantize`"):
        collect()
    assert not (run / "report.png").exists()
    quantize_run(run, "int8", device="cpu")
    with pytest.raises(UserError, match=r"ends in \.png"):
        collect(out="weights.safetensors")
    with pytest.raises(UserError, match=r"cannot write in runs/1/config\.json"):
        collect(out=run / "config.json" / "a.png")
    with pytest.raises(UserError, match="there is no run runs/8"):
        collect(["runs/8"])
    with pytest.raises(UserError, match="give its run"):
        collect([run / "int8"])
    with (run / "rows.jsonl").open("a") as file:
        file.write("{broken\n")
    with pytest.raises(UserError, match="line 3 is not a JSON object"):
        collect()


def test_no_run_at_all():
    with pytest.raises(UserError, match="make one with `qsparse train`"):
        collect()
