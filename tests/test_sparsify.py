"""A run pruned in other ways than by magnitude: variants, rows, commands."""

import functools
import json
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import cli, sparse, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.sparse import command, config
from qsparse.sparse.compare import DTYPES
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.run import load_dataset, train
from qsparse.variants import sparsify_run, sparsify_sweep


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))


@pytest.fixture
def run() -> Path:
    config = TrainConfig(hidden=(32,), epochs=2, data="mnist-5k", device="cpu", momentum=0.5, weight_decay=1e-4)
    return train(config).run


def invoke(*arguments):
    return CliRunner().invoke(cli.app, [str(argument) for argument in arguments])


@pytest.mark.parametrize("pruner", ["random", "wanda", "snip", "sparsegpt"])
def test_a_row_says_how_it_was_pruned(run, pruner):
    result = sparsify_run(run, 0.2, pruner=pruner, distribution="erk", finetune_epochs=1, device="cpu")
    assert result.directory == run / f"csr-0.2-{pruner}-erk-ft1"
    row = result.rows[1]
    assert (row["method"], row["distribution"], row["pattern"]) == (pruner, "erk", None)
    assert (row["density_asked"], row["prune_seed"]) == (0.2, 0)
    model = qsparse.load(result.directory)
    assert sum(layer.nnz for layer in model.layers().values()) == round(0.2 * (784 * 32 + 32 * 10))
    assert row["layer_density"] == {name: layer.nnz / (layer.in_features * layer.out_features)
                                    for name, layer in model.layers().items()}  # fmt: skip
    assert row["accuracy"] == evaluate(model, load_dataset(run).test)[0]
    json.dumps(result.rows, allow_nan=False)


def test_a_pattern_is_stored_as_csr_and_the_row_says_so(run):
    result = invoke("sparsify", run, "--pattern", "2:4", "--pruner", "sparsegpt", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    row = value["rows"][1]
    assert value["variant"] == "csr-2of4-sparsegpt"
    assert (row["format"], row["pattern"], row["density"], row["density_asked"]) == ("csr", "2:4", 0.5, None)
    stored = qsparse.load(value["saved"]).fc1
    dense = sparse.from_csr(stored.values, stored.col_indices, stored.row_offsets, (32, 784))
    assert int((dense.reshape(32, -1, 4) != 0).sum(dim=2).max()) <= 2


@pytest.mark.parametrize(
    ("options", "variant", "format", "dtype"),
    [
        (("--format", "2:4"), "2of4", "2:4", "float16"),
        (("--format", "2:4", "--dtype", "bf16", "--pruner", "sparsegpt"), "2of4-bf16-sparsegpt", "2:4", "bfloat16"),
        (("--format", "2:4", "--pattern", "1:4", "--finetune-epochs", 1), "2of4-1of4-ft1", "2:4", "float16"),
        (("--format", "bitmap", "--density", 0.3), "bitmap-0.3", "bitmap", "float16"),
        (("--format", "entries", "--density", 0.3), "entries-0.3", "entries", "float16"),
        (("--format", "csr", "--density", 0.3, "--dtype", "fp16"), "csr-0.3-fp16", "csr", "float16"),
    ],
)
def test_every_format_is_stored_loaded_and_measured(run, options, variant, format, dtype):
    result = invoke("sparsify", run, *options, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    row = value["rows"][1]
    assert (value["variant"], row["format"], row["dtype"]) == (variant, format, dtype)
    model = qsparse.load(value["saved"])
    assert row["accuracy"] == evaluate(model, load_dataset(run).test)[0]
    assert row["weight_bytes"] == sum(t.numel() * t.element_size() for t in model.state_dict().values())
    kept = {"2of4-1of4-ft1": 0.25, "2of4": 0.5, "2of4-bf16-sparsegpt": 0.5}
    assert row["density"] == kept.get(variant, round(0.3 * (784 * 32 + 320)) / (784 * 32 + 320))
    by = {"2:4": "gemm_24", "bitmap": "spmm_bitmap", "entries": "spmm_entries", "csr": "spmm_csr"}
    assert row["kernel"] == f"{by[format]}:cpu"


@pytest.mark.parametrize("command", ["sparsify", "compress"])
@pytest.mark.parametrize("criterion", ["bytes", "time"])
def test_auto_says_what_every_format_costs(run, command, criterion):
    how = ("--format", "auto", "--auto", criterion, "--pattern", "2:4")
    how += ("--auto-batch", 8) if criterion == "time" else ()
    result = invoke(command, run, *how, "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    row, model = value["rows"][1], qsparse.load(value["saved"])
    assert value["variant"].removeprefix("int8-") == {"bytes": "auto-2of4", "time": "autotime-batch8-2of4"}[criterion]
    assert (row["auto"], row["auto_batch"]) == (criterion, 8 if criterion == "time" else None)
    for name, layer in model.layers().items():
        costs = row["auto_costs"][name]
        assert getattr(layer, "format", "dense") == min(costs, key=costs.get)
        assert {"csr", "2:4", "dense"} <= set(costs)
    assert f"fc1: {min(row['auto_costs']['fc1'], key=row['auto_costs']['fc1'].get)} " in result.stderr
    assert row["dtype"] == "int8" or command == "sparsify"
    assert row["density"] == 0.5


def test_the_density_is_what_stays_however_a_layer_is_stored(run):
    """At 0.4 fc1 is smallest in a sparse format, and fc2, almost full, when it is dense: its zeros are zeros there."""
    value = sparsify_run(run, 0.4, "auto", dtype="fp32", pruner="magnitude", min_density=0.3, device="cpu")
    row = value.rows[1]
    assert "dense" in row["format"].split("+")
    assert row["layer_density"]["fc2"] < 1
    total = sum(row["layer_density"][name] * size for name, size in (("fc1", 784 * 32), ("fc2", 320)))
    assert row["density"] == round(total) / (784 * 32 + 320) == round(0.4 * (784 * 32 + 320)) / (784 * 32 + 320)


def test_movement_at_one_stroke_is_told_what_it_is_for(run):
    options = ("--density", 0.3, "--pruner", "movement", "--samples", 128, "--device", "cpu")
    assert "give --schedule gradual --epochs 4" in " ".join(invoke("sparsify", run, *options).stderr.split())
    gradual = invoke("sparsify", run, *options, "--schedule", "gradual", "--epochs", 1)
    assert "give --schedule" not in " ".join(gradual.stderr.split())


@pytest.mark.parametrize(("options", "kept"), [((0.3, "--pruner", "wanda"), True), ((1,), False)])
def test_a_row_says_whether_the_biases_were_corrected(run, options, kept):
    result = invoke("sparsify", run, "--density", *options, "--correct-bias", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    row = value["rows"][1]
    assert (row["correct_bias"], row["bias_corrected"]) == (True, kept)
    assert torch.equal(qsparse.load(value["saved"]).fc1.bias, qsparse.load(run).fc1.bias) != kept
    assert ("The biases stay as they were" in " ".join(result.stderr.split())) != kept


def test_another_seed_has_another_directory(run):
    first, second = (sparsify_run(run, 0.2, pruner="random", seed=seed, device="cpu") for seed in (1, 2))
    assert {first.directory.name, second.directory.name} == {"csr-0.2-random-seed1", "csr-0.2-random-seed2"}
    assert not torch.equal(
        qsparse.load(first.directory).fc1.col_indices, qsparse.load(second.directory).fc1.col_indices
    )


def test_the_seed_left_out_is_the_runs():
    run = train(TrainConfig(hidden=(8,), epochs=1, data="mnist-5k", device="cpu", seed=5)).run
    assert sparsify_run(run, 0.2, pruner="random", device="cpu").rows[1]["prune_seed"] == 5


def test_min_density_from_the_command_line(run):
    options = ("--density", 0.01, "--min-density", 0.01, "--samples", 64, "--pruner", "snip", "--device", "cpu")
    result = invoke("sparsify", run, *options, "--json")
    assert result.exit_code == 0, result.stderr
    row = json.loads(result.stdout)["rows"][1]
    assert row["samples"] == 64
    assert min(row["layer_density"].values()) >= 0.009


def test_pruned_weights_are_not_trained_back(run):
    pruned = qsparse.load(sparsify_run(run, 0.1, pruner="sparsegpt", device="cpu").directory)
    tuned = qsparse.load(sparsify_run(run, 0.1, pruner="sparsegpt", finetune_epochs=1, device="cpu").directory)
    for name, layer in tuned.layers().items():
        assert torch.equal(layer.col_indices, pruned.layers()[name].col_indices)
        assert (layer.values != pruned.layers()[name].values).float().mean() > 0.9


@pytest.mark.parametrize(
    ("options", "said"),
    [
        ((), "give one of --density (0.1 keeps a tenth of the weights) and --pattern"),
        (("--density", 0.5, "--pattern", "2:4"), "give one of"),
        (("--pattern", "4:2"), "N:M with 1 <= N < M <= 32"),
        (("--density", 0.1, "--min-density", 0.2), "from 0 to the density, 0.1"),
        (("--density", 0.1, "--pruner", "obd"), "'sparsegpt'"),
        (("--density", 0.1, "--distribution", "even"), "'erk'"),
        (("--pattern", "2:4", "--distribution", "erk"), "give no distribution"),
    ],
)
def test_mistakes_are_sentences(options, said):
    result = invoke("sparsify", *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_what_is_refused_in_python_is_refused_before_anything_is_read():
    with pytest.raises(UserError, match="unknown pruner"):
        sparsify_run("runs/1", 0.1, pruner="obd")
    with pytest.raises(TypeError, match="prunner"):
        sparsify_run("runs/1", 0.1, prunner="wanda")
    with pytest.raises(UserError, match=r"The density is \[0.1\]: it must be a number"):
        sparsify_sweep("runs/1", [[0.1]])


def test_the_choices_are_those_of_the_room():
    assert tuple(command.Pruner) == sparse.PRUNERS
    assert tuple(command.Distribution) == sparse.DISTRIBUTIONS


def test_formats_are_compared():
    result = invoke("formats", "--shape", "1000", "--density", 0.2, "--dtype", "float16", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    assert {size["format"]: size["bytes"] for size in value["sizes"]} == {
        "dense": 2000, "coo": 1200, "bitmap": 525, "2:4": 1125
    }  # fmt: skip
    assert "break-even" in result.stderr
    assert "256 x 784 float32, density 0.1" in invoke("formats").stdout
    assert tuple(command.ValueDtype) == DTYPES
    for options in (("--shape", "a"), ("--density", 0), ("--dtype", "int4"), ("--shape", "0")):
        assert invoke("formats", *options).exit_code == 2


def test_a_gradual_schedule(run):
    options = ("--schedule", "gradual", "--epochs", 2, "--finetune-epochs", 1, "--lr", 0.05, "--device", "cpu")
    result = invoke("sparsify", run, "--density", 0.05, *options, "--json")
    assert result.exit_code == 0, result.stderr
    assert "epoch 3/3" in result.stderr
    value = json.loads(result.stdout)
    row = value["rows"][1]
    assert value["variant"] == "csr-0.05-gradual2-ft1"
    assert (row["schedule"], row["gradual_epochs"], row["finetune_epochs"], row["finetune_lr"]) == (
        "gradual", 2, 1, 0.05
    )  # fmt: skip
    model = qsparse.load(value["saved"])
    assert sum(layer.nnz for layer in model.layers().values()) == round(0.05 * (784 * 32 + 32 * 10))
    assert row["accuracy"] == evaluate(model, load_dataset(run).test)[0]
    assert row["accuracy"] > sparsify_run(run, 0.05, device="cpu").rows[1]["accuracy"]


def test_a_sweep_says_of_which_density_each_epoch_and_sentence_is(run):
    how = ("--finetune-epochs", 1, "--format", "auto", "--device", "cpu")
    result = invoke("sparsify", run, "--density", "0.5,0.1", *how)
    assert result.exit_code == 0, result.stderr
    lines = result.stderr.splitlines()
    for variant in ("auto-0.5-ft1", "auto-0.1-ft1"):
        assert [line for line in lines if line.startswith(f"{variant}: epoch 1/1  loss ")]
        assert [line for line in lines if line.startswith(f"{variant}: fc1: ")]
    assert not [line for line in lines if line.startswith(("epoch", "fc1"))]


def test_a_sweep_makes_one_table(run):
    result = invoke("sparsify", run, "--density", "0.5,0.3,0.1", "--device", "cpu", "--json")
    assert result.exit_code == 0, result.stderr
    value = json.loads(result.stdout)
    names = ["csr-0.5", "csr-0.3", "csr-0.1"]
    assert [row["variant"] for row in value["rows"]] == ["baseline", *names]
    assert [each["saved"] for each in value["variants"]] == [f"runs/1/{name}" for name in names]
    assert all(name in result.stderr for name in names)
    assert set(value["crossovers"]) == {"1", "bytes"}
    assert 0.1 < value["crossovers"]["bytes"] < 0.5  # 8 bytes an entry, and the offsets
    assert "Crossovers: faster at batch 1 " in result.stderr
    single = sparsify_run(run, 0.3, device="cpu").rows[1]  # each starts from the run itself
    assert value["rows"][2]["accuracy"] == single["accuracy"]


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (("--density", "0.5,x"), "neither a number nor numbers with commas"),
        (("--density", "0.5,"), "neither a number nor numbers with commas"),
        (("--density", "0.5,2"), "outside (0, 1]"),
        (("--density", "0.5,0.5"), "give each once"),
        (("--density", "0.5,0.1", "--min-density", 0.3), "min_density is 0.3: it must be from 0 to the density, 0.1"),
        (("--density", "0.5,0.25", "--format", "2:4"), "2:4 stores 2 of each 4 weights, a density of 0.5, not 0.25"),
        (("--density", 0.5, "--schedule", "gradual"), "needs at least 1"),
        (("--density", 0.5, "--epochs", 2), "it is of a --schedule other than one-shot"),
        (("--density", 0.5, "--lr", 0.1), "--lr has no effect here: it is of the training: give --finetune-epochs"),
        (("--density", 0.5, "--schedule", "set", "--epochs", 1, "--pruner", "magnitude"), "give no pruner with it"),
        (("--pattern", "2:4", "--schedule", "gradual", "--epochs", 1), "none on the way"),
        (("--density", 0.5, "--correct-bias", "--schedule", "lottery", "--epochs", 1), "of pruning at one stroke"),
        (("--density", 0.5, "--permute"), "--permute orders the columns for an N:M pattern"),
        (("--density", 0.5, "--pruner", "sparsegpt", "--schedule", "gradual", "--epochs", 1), "another pruner"),
    ],
)
def test_mistakes_of_schedules_and_sweeps_are_sentences(options, said):
    result = invoke("sparsify", *options)
    assert result.exit_code == 2
    assert said in " ".join(result.stderr.replace("│", " ").split())


def test_the_schedules_are_those_of_the_room():
    assert tuple(command.Schedule) == config.SCHEDULES
