"""Whole runs on the 5,000 digits: the directory, going on after an interruption, and what is refused."""

import dataclasses
import errno
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from rich.console import Console

from qsparse import checkpoint, data
from qsparse.errors import UserError
from qsparse.train.config import TrainConfig
from qsparse.train.cuda_backend import CudaBackend
from qsparse.train.run import identity, load_dataset, resume, train

ROOT = Path(__file__).resolve().parents[2]
SMALL = TrainConfig(hidden=(32,), epochs=3, data="mnist-5k", device="cpu", momentum=0.5, weight_decay=1e-4)


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture(scope="module")
def whole(tmp_path_factory) -> dict[str, torch.Tensor]:
    """The weights of SMALL, trained without an interruption."""
    return checkpoint.load(train(SMALL, out=tmp_path_factory.mktemp("whole") / "run").run).state_dict()


def assert_same_weights(run: Path, expected: dict[str, torch.Tensor]) -> None:
    got = checkpoint.load(run).state_dict()
    assert got.keys() == expected.keys()
    assert all(torch.equal(got[name], tensor) for name, tensor in expected.items())


def interrupt_at(monkeypatch, epoch: int, batch: int) -> None:
    """Let Ctrl-C come before the given batch of the given epoch (both from 0), once."""
    batches = data.batches

    def interrupted(split, batch_size, *, seed, epoch: int, at=epoch):
        for number, item in enumerate(batches(split, batch_size, seed=seed, epoch=epoch)):
            if (epoch, number) == (at, batch):
                monkeypatch.setattr(data, "batches", batches)
                raise KeyboardInterrupt
            yield item

    monkeypatch.setattr(data, "batches", interrupted)


def test_the_default_network_learns_the_5k_subset():
    trained = train(TrainConfig(data="mnist-5k", device="cpu", epochs=8))
    assert trained.run == Path("runs/1")
    assert trained.metrics[-1]["test_accuracy"] >= 0.90
    assert trained.metrics[-1]["validation_accuracy"] >= 0.90


def test_a_run_directory_holds_weights_config_and_metrics():
    trained = train(SMALL, out="somewhere/deep")
    assert sorted(path.name for path in trained.run.iterdir()) == ["config.json", "metrics.json", "model.safetensors"]
    config = json.loads((trained.run / "config.json").read_text())
    assert config["train"] == {**SMALL.to_json(), "validation": 500, "backend": "torch"}
    assert config["dataset"]["name"] == "mnist-5k"
    assert [config["dataset"][split] for split in ("train", "validation", "test")] == [3500, 500, 1000]
    assert config["model"]["sizes"] == [784, 32, 10]
    metrics = json.loads((trained.run / "metrics.json").read_text())
    assert metrics["epochs"] == trained.metrics
    assert metrics["test_accuracy"] == trained.metrics[-1]["test_accuracy"]
    json.dumps(trained.to_json(), allow_nan=False)


def test_runs_are_numbered():
    one_epoch = TrainConfig(hidden=(), epochs=1, data="mnist-5k", device="cpu")
    assert [train(one_epoch).run for _ in range(2)] == [Path("runs/1"), Path("runs/2")]


@pytest.mark.parametrize(("epoch", "batch"), [(1, 0), (1, 20), (2, 54)])
def test_an_interrupted_run_comes_out_bit_for_bit_the_same(monkeypatch, whole, epoch, batch):
    interrupt_at(monkeypatch, epoch, batch)
    with pytest.raises(KeyboardInterrupt, match=rf"epoch {epoch} of 3 is saved in runs/1; go on with .*--resume"):
        train(SMALL)
    with pytest.raises(UserError, match=rf"not done \({epoch} of 3 epochs\): finish it with `qsparse train --resume"):
        checkpoint.load("runs/1")
    assert len(checkpoint.read_metrics(Path("runs/1"))) == epoch
    resumed = resume({}, out="runs/1")
    assert [entry["epoch"] for entry in resumed.metrics] == [1, 2, 3]
    assert_same_weights(Path("runs/1"), whole)
    assert not (Path("runs/1") / "checkpoint.safetensors").exists()


def test_interrupted_before_the_first_epoch_is_done(monkeypatch, whole):
    interrupt_at(monkeypatch, 0, 5)
    with pytest.raises(KeyboardInterrupt, match="no epoch was finished"):
        train(SMALL)
    with pytest.raises(UserError, match=r"not done \(0 of 3 epochs\)"):
        checkpoint.load("runs/1")
    resume({})
    assert_same_weights(Path("runs/1"), whole)


def test_interrupted_between_the_last_checkpoint_and_the_model(monkeypatch, whole):
    def stopped(*_):
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_weights", stopped)
        with pytest.raises(KeyboardInterrupt, match="epoch 3 of 3 is saved"):
            train(SMALL)
    (Path("runs/1") / "metrics.json").unlink()  # it is written again from the checkpoint
    assert len(resume({}).metrics) == 3
    assert len(checkpoint.read_metrics("runs/1")) == 3
    assert_same_weights(Path("runs/1"), whole)


def test_a_killed_process_loses_the_running_epoch_only():
    options = ["--hidden", "0", "--epochs", "60", "--batch-size", "64", "--momentum", "0.9", "--data", "mnist-5k"]
    config = TrainConfig(hidden=(), epochs=60, batch_size=64, momentum=0.9, data="mnist-5k", device="cpu")
    process = subprocess.Popen(
        [sys.executable, "-m", "qsparse", "train", *options, "--device", "cpu", "--out", "killed"],
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    killed = Path("killed")
    deadline = time.monotonic() + 60
    while not (killed / "checkpoint.safetensors").exists() and time.monotonic() < deadline:
        time.sleep(0.002)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert not checkpoint.is_finished(killed)
    assert 1 <= len(resume({}, out=killed).metrics) == 60
    assert_same_weights(killed, checkpoint.load(train(config, out="whole").run).state_dict())


def test_resuming_a_finished_run_changes_nothing(capsys):
    trained = train(SMALL)
    before = {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in trained.run.iterdir()}
    again = resume({}, console=Console(stderr=True))
    assert "is done: all 3 epochs" in capsys.readouterr().err
    assert again.metrics == trained.metrics
    assert {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in trained.run.iterdir()} == before


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("epochs", 9),
        ("hidden", (64,)),
        ("lr", 0.2),
        ("seed", 1),
        ("batch_size", 32),
        ("momentum", 0.9),
        ("weight_decay", 0.0),
        ("data", "mnist"),
        ("validation", 0),
        ("device", "cuda"),
        ("backend", "numpy"),
        ("precision", "tf32"),
    ],
)
def test_resuming_with_another_setting_is_refused(monkeypatch, field, value):
    interrupt_at(monkeypatch, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL)
    before = snapshot(Path("runs/1"))
    with pytest.raises(UserError, match=f"was begun with --{field.replace('_', '-')} "):
        resume({field: value})
    assert snapshot(Path("runs/1")) == before


@pytest.mark.parametrize("backend", ["numpy", "c"])
def test_an_interrupted_run_goes_on_with_its_own_backend(monkeypatch, backend):
    config = dataclasses.replace(SMALL, backend=backend, device="auto")
    expected = checkpoint.load(train(config, out="whole").run).state_dict()
    interrupt_at(monkeypatch, 1, 20)
    with pytest.raises(KeyboardInterrupt):
        train(config)
    assert json.loads(Path("runs/1/config.json").read_text())["train"]["backend"] == backend
    before = snapshot(Path("runs/1"))
    with pytest.raises(UserError, match=f"was begun with --backend {backend}, and torch would give other weights"):
        resume({"backend": "torch"})
    assert snapshot(Path("runs/1")) == before
    resume({"backend": "auto"})
    assert_same_weights(Path("runs/1"), expected)


def test_a_run_from_before_there_were_backends_is_resumed(monkeypatch, whole):
    interrupt_at(monkeypatch, 1, 20)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL)
    config = json.loads(Path("runs/1/config.json").read_text())
    del config["train"]["backend"]
    Path("runs/1/config.json").write_text(json.dumps(config))
    resume({"backend": "torch"})
    assert_same_weights(Path("runs/1"), whole)


@pytest.mark.parametrize(
    ("backend", "device", "said"),
    [
        ("cuda", "cpu", "--backend cuda computes on a GPU"),
        ("cuda", "auto", "--backend cuda: PyTorch sees no NVIDIA GPU"),
        ("c", "cuda", "--backend c computes on the CPU"),
        ("c", "cpu", "needs a C compiler"),
    ],
)
def test_a_backend_that_cannot_run_is_refused_before_anything_is_made(monkeypatch, tmp_path, backend, device, said):
    monkeypatch.setattr(torch.version, "cuda", "13.0")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "empty"))
    monkeypatch.delenv("CC", raising=False)
    with pytest.raises(UserError, match=said):
        train(dataclasses.replace(SMALL, backend=backend, device=device))
    assert list(Path().iterdir()) == []


def test_a_precision_that_only_the_gpu_has_is_refused_elsewhere():
    with pytest.raises(UserError, match="--precision tf32 is for --backend cuda in one process"):
        train(dataclasses.replace(SMALL, precision="tf32"))
    assert list(Path().iterdir()) == []


def test_resuming_with_the_same_settings_is_allowed(monkeypatch, whole):
    interrupt_at(monkeypatch, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL)
    resume({"hidden": (32,), "epochs": 3, "data": "auto", "device": "auto", "validation": 500, "lr": 0.1})
    assert_same_weights(Path("runs/1"), whole)


def test_resuming_without_a_run_names_the_command():
    with pytest.raises(UserError, match="no run under runs/ yet: make one with `qsparse train`"):
        resume({})
    Path("empty").mkdir()
    with pytest.raises(UserError, match="empty holds no qsparse run"):
        resume({}, out="empty")


def test_data_that_changed_are_refused(monkeypatch):
    interrupt_at(monkeypatch, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL)
    config = json.loads(Path("runs/1/config.json").read_text())
    config["dataset"]["digest"] = "0" * 32
    Path("runs/1/config.json").write_text(json.dumps(config))
    with pytest.raises(UserError, match="was trained on other data"):
        resume({})
    with pytest.raises(UserError, match="was trained on other data"):
        load_dataset(Path("runs/1"))


@pytest.mark.parametrize("value", ["", "nowhere"])
def test_data_that_are_not_found_are_named(monkeypatch, value):
    run = train(SMALL).run
    config = json.loads((run / "config.json").read_text())
    config["train"]["data"], config["dataset"]["source"] = "mnist", "/once/here"
    (run / "config.json").write_text(json.dumps(config))
    monkeypatch.setenv("QSPARSE_DATA", value)
    with pytest.raises(UserError, match=r"--data DIR|lacks train-images") as caught:
        load_dataset(run)
    assert str(caught.value).endswith("; runs/1 was trained on /once/here")


def test_a_data_directory_that_was_moved_is_found_again(monkeypatch):
    subset, asked = data.load("mnist-5k"), []

    def load(name, validation, say):
        asked.append(name)
        return subset

    monkeypatch.setattr(data, "load", load)
    Path("digits").mkdir()
    run = train(dataclasses.replace(SMALL, data="digits")).run
    load_dataset(run)
    Path("digits").rename("elsewhere")
    load_dataset(run)
    assert asked == ["digits", str(Path("digits").absolute()), "auto"]


def test_mnist_is_read_where_the_training_found_it(monkeypatch):
    subset, asked = data.load("mnist-5k"), []
    mnist = dataclasses.replace(subset, name="mnist", source="digits")

    def load(name, validation, say):
        asked.append(name)
        return mnist

    monkeypatch.setattr(data, "load", load)
    monkeypatch.setenv("QSPARSE_DATA", "digits")
    Path("digits").mkdir()
    run = train(dataclasses.replace(SMALL, data="auto")).run
    load_dataset(run)  # QSPARSE_DATA, which is set
    monkeypatch.delenv("QSPARSE_DATA")
    load_dataset(run)
    Path("digits").rmdir()
    load_dataset(run)
    assert asked == ["auto", "mnist", "digits", "mnist"]


def test_data_that_auto_found_are_named_for_good(monkeypatch):
    custom = dataclasses.replace(data.load("mnist-5k"), name="custom", source="digits")
    for dataset, expected in ((custom, str(Path("digits").absolute())), (data.load("mnist-5k"), "mnist-5k")):
        with monkeypatch.context() as patch:
            patch.setattr(data, "load", lambda *_, found=dataset: found)
            trained = train(TrainConfig(hidden=(), epochs=1, device="cpu"))
        assert trained.config["train"]["data"] == expected


def test_identity_sees_one_changed_pixel():
    dataset = data.load("mnist-5k")
    before = identity(dataset)
    assert identity(data.load("mnist-5k")) == before
    dataset.test.images[0, 0] += 1
    assert identity(dataset)["digest"] != before["digest"]


def test_a_directory_that_holds_a_run_is_kept_without_force():
    train(SMALL, out="mine")
    before = snapshot(Path("mine"))
    with pytest.raises(UserError, match=r"mine already holds a run: .*--resume.*--force"):
        train(SMALL, out="mine")
    assert snapshot(Path("mine")) == before


def test_force_replaces_the_run_and_what_was_measured_of_it_and_nothing_else():
    run = train(SMALL, out="mine").run
    model = checkpoint.load(run)
    checkpoint.save_model(run / "int8", model, {"run": "mine", "variant": "int8"})
    checkpoint.append_rows(run, [{"variant": "int8"}])
    (run / "notes.txt").write_text("mine")
    (run / "other").mkdir()
    (run / "other" / "config.json").write_text('{"model": "of another project"}')
    (run / "other" / "model.safetensors").write_bytes(b"")
    checkpoint.save_model(run / "fp16", model, {"run": "mine", "variant": "fp16"})
    (run / "fp16" / "notes.txt").write_text("mine too")
    elsewhere = checkpoint.save_model("elsewhere", model, {"run": "mine", "variant": "csr"})
    (run / "csr").symlink_to(Path("elsewhere").absolute())
    replaced = train(TrainConfig(hidden=(), epochs=1, data="mnist-5k", device="cpu"), out=run, force=True)
    assert sorted(path.name for path in run.iterdir()) == [
        "config.json", "csr", "fp16", "metrics.json", "model.safetensors", "notes.txt", "other",
    ]  # fmt: skip
    assert [path.name for path in (run / "fp16").iterdir()] == ["notes.txt"]
    assert elsewhere.exists()
    assert checkpoint.load(replaced.run).sizes == (784, 10)


def test_force_on_a_full_disk_keeps_the_old_run(monkeypatch):
    train(SMALL, out="mine")
    before = snapshot(Path("mine"))

    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(UserError, match=r"cannot write mine/\.room: No space left on device"):
        train(SMALL, out="mine", force=True)
    assert snapshot(Path("mine")) == before


def test_a_directory_that_is_being_trained_in_is_left_alone(monkeypatch, whole):
    interrupt_at(monkeypatch, 1, 0)
    with pytest.raises(KeyboardInterrupt):
        train(SMALL, out="mine")
    before = snapshot(Path("mine"))
    with checkpoint.exclusive(Path("mine")):
        for begin in (lambda: resume({}, out="mine"), lambda: train(SMALL, out="mine", force=True)):
            with pytest.raises(UserError, match="another process is training in mine: wait for it"):
                begin()
    assert snapshot(Path("mine")) == before
    resume({}, out="mine")
    assert_same_weights(Path("mine"), whole)


def test_a_run_that_appears_while_the_data_are_loaded_is_kept(monkeypatch):
    subset = data.load("mnist-5k")

    def load(*_):
        monkeypatch.setattr(data, "load", lambda *_: subset)
        train(SMALL, out="mine")
        return subset

    monkeypatch.setattr(data, "load", load)
    with pytest.raises(UserError, match="mine already holds a run"):
        train(TrainConfig(hidden=(), epochs=1, data="mnist-5k", device="cpu"), out="mine")
    assert checkpoint.load("mine").sizes == (784, 32, 10)


@pytest.mark.parametrize("config", [{"data": "/nowhere"}, {"data": "mnist-5k", "validation": 4000}])
def test_force_keeps_the_old_run_when_the_new_one_cannot_start(config):
    train(SMALL, out="mine")
    before = snapshot(Path("mine"))
    with pytest.raises(UserError):
        train(TrainConfig(device="cpu", **config), out="mine", force=True)
    assert snapshot(Path("mine")) == before


def test_force_spares_files_of_another_project():
    Path("theirs").mkdir()
    Path("theirs/config.json").write_text('{"architectures": ["BertModel"]}')
    before = snapshot(Path("theirs"))
    with pytest.raises(UserError, match="named as a run's but are not one"):
        train(SMALL, out="theirs", force=True)
    assert snapshot(Path("theirs")) == before


def test_nothing_is_left_behind_when_the_data_are_not_there():
    with pytest.raises(UserError, match="nowhere"):
        train(TrainConfig(data="nowhere", device="cpu"))
    assert list(Path().iterdir()) == []


def test_a_network_that_does_not_fit_in_memory_is_refused():
    with pytest.raises(UserError, match="--hidden 2000000000 is too large for this machine's memory"):
        train(TrainConfig(hidden=(2 * 10**9,), data="mnist-5k", device="cpu"))
    assert list(Path().iterdir()) == []


@pytest.mark.parametrize("out", ["file", "file/below", "/proc/nothing/here"])
def test_a_directory_that_cannot_be_written_is_refused_before_the_data_are_loaded(monkeypatch, out):
    Path("file").write_text("not a directory")
    monkeypatch.setattr(data, "load", lambda *_: pytest.fail("loaded the data first"))
    with pytest.raises(UserError, match="cannot write in"):
        train(SMALL, out=out)
    assert Path("file").read_text() == "not a directory"


def test_a_diverging_run_says_so_and_can_be_told_from_a_finished_one():
    with pytest.raises(UserError, match="diverged"):
        train(TrainConfig(data="mnist-5k", device="cpu", lr=1e30))
    with pytest.raises(UserError, match=r"not done \(0 of 5 epochs\)"):
        checkpoint.load("runs/1")


@pytest.mark.gpu
def test_the_gpu_trains_to_the_accuracy_of_the_cpu(real_data):
    config = TrainConfig(epochs=2, data=str(real_data))
    accuracies = [
        train(dataclasses.replace(config, device=device)).metrics[-1]["test_accuracy"] for device in ("cpu", "cuda")
    ]
    assert abs(accuracies[0] - accuracies[1]) <= 0.003


@pytest.mark.gpu
def test_the_gpu_computes_the_weights_of_the_cpu(whole):
    trained = checkpoint.load(train(dataclasses.replace(SMALL, device="cuda")).run).state_dict()
    for name, tensor in whole.items():
        assert (trained[name] - tensor).norm() < 1e-3 * tensor.norm(), name


@pytest.mark.gpu
def test_an_interrupted_run_on_the_gpu_comes_out_bit_for_bit_the_same(monkeypatch):
    config = dataclasses.replace(SMALL, device="cuda")
    expected = checkpoint.load(train(config, out="whole").run).state_dict()
    whole_epoch = CudaBackend.epoch  # one call to the device: an interrupt comes before it or after it

    def interrupted(self, split, epoch: int, rates):
        if epoch == 1:
            monkeypatch.setattr(CudaBackend, "epoch", whole_epoch)
            raise KeyboardInterrupt
        return whole_epoch(self, split, epoch, rates)

    monkeypatch.setattr(CudaBackend, "epoch", interrupted)
    with pytest.raises(KeyboardInterrupt, match="epoch 1 of 3 is saved"):
        train(config)
    resume({}, out="runs/1")
    assert_same_weights(Path("runs/1"), expected)


def snapshot(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}
