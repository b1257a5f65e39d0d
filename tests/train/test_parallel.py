"""Processes that train together: the same weights as one alone, and a rank that fails."""

import contextlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from qsparse import checkpoint
from qsparse.errors import UserError
from qsparse.train import parallel
from qsparse.train.config import TrainConfig
from qsparse.train.run import resume, train

ROOT = Path(__file__).resolve().parents[2]
# 3,501 images: the last batch is of one, and one of two ranks gets nothing of it.
CONFIG = TrainConfig(
    hidden=(16,), epochs=2, batch_size=50, momentum=0.9, lr=0.02, data="mnist-5k", validation=499, device="cpu"
)
OPTIONS = (
    *("train", "--hidden", "16", "--epochs", "2", "--batch-size", "50", "--momentum", "0.9", "--lr", "0.02"),
    *("--data", "mnist-5k", "--validation", "499", "--device", "cpu", "--out", "run"),
)
# Runs the command line; rank 1 ends without a word in the second epoch, as a process that is killed.
FAILING = """
import os
from qsparse import data
from qsparse.cli import main
batches = data.batches
def dying(split, batch_size, *, seed, epoch):
    for number, batch in enumerate(batches(split, batch_size, seed=seed, epoch=epoch)):
        if (os.environ["RANK"], epoch, number) == ("1", 1, 5):
            os._exit(9)
        yield batch
data.batches = dying
main()
"""


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def torchrun(*command: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", *command],
        env={**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path]), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )


def assert_close(run: Path, atol: float = 1e-5) -> None:
    expected = checkpoint.load(train(CONFIG, out="alone").run).state_dict()
    torch.testing.assert_close(checkpoint.load(run).state_dict(), expected, rtol=1e-3, atol=atol)


@pytest.mark.parametrize(("rows", "ranks"), [(64, 2), (1, 2), (7, 3), (2, 5), (0, 2)])
def test_shares_hold_each_row_once_and_differ_by_one_at_most(rows, ranks):
    batch = list(range(rows))
    shares = [batch[parallel.share(rows, number, ranks)] for number in range(ranks)]
    assert [row for each in shares for row in each] == batch
    lengths = [len(each) for each in shares]
    assert max(lengths) - min(lengths) <= 1


def test_two_processes_train_as_one():
    done = torchrun("-m", "qsparse", *OPTIONS)
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("test accuracy") == 1
    assert done.stderr.count("epoch 2/2") == 1
    for epoch in checkpoint.read_metrics("run"):
        assert epoch["processes"] == 2
        assert epoch["all_reduce_bytes"] == 71 * 4 * (784 * 16 + 16 + 16 * 10 + 10 + 1)
        assert 0 < epoch["all_reduce_s"] < epoch["seconds"]
    assert_close(Path("run"))


@pytest.mark.gpu
def test_two_gpus_train_as_one(monkeypatch):
    if torch.cuda.device_count() < 2:
        pytest.skip("two GPUs are needed")
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "0")  # multicast over NVLink is not there in every virtual machine
    options = ["cuda" if option == "cpu" else option for option in OPTIONS]
    done = torchrun("-m", "qsparse", *options)
    assert done.returncode == 0, done.stderr
    for epoch in checkpoint.read_metrics("run"):
        assert epoch["processes"] == 2
        assert epoch["all_reduce_bytes"] == 71 * 4 * (784 * 16 + 16 + 16 * 10 + 10 + 1)
        assert 0 < epoch["all_reduce_s"] < epoch["seconds"]
    assert_close(Path("run"), atol=1e-3)  # other kernels round otherwise


def test_a_rank_that_dies_ends_the_run_and_the_checkpoint_is_whole():
    Path("failing.py").write_text(FAILING)
    done = torchrun("failing.py", *OPTIONS)
    assert done.returncode != 0
    assert "test accuracy" not in done.stdout
    said = next(line for line in done.stderr.splitlines() if line.startswith("Error: rank 0 of 2: "))
    assert "another" in said  # by what it saw itself, or by what torchrun did, whichever came first
    assert "epoch 1 of 2 is saved in run" in said
    assert "qsparse train --resume --out run" in said
    assert len(checkpoint.read_metrics("run")) == 1
    assert len(resume({}, out="run").metrics) == 2
    assert_close(Path("run"))


def test_backends_of_one_process_are_refused(monkeypatch):
    monkeypatch.setattr(parallel, "size", lambda: 2)
    monkeypatch.setattr(parallel, "joined", contextlib.nullcontext)
    with pytest.raises(UserError, match="--backend numpy trains in one process, and torchrun started 2"):
        train(TrainConfig(backend="numpy", data="mnist-5k"))
