"""What is said of a training."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from qsparse.models import MLP
from qsparse.train.fit import EpochEnd
from qsparse.train.progress import Display, shortest


@pytest.mark.parametrize(
    ("seconds", "text"), [(0.0123, "0.012 s"), (0.1, "0.10 s"), (0.996, "1.0 s"), (1.26, "1.3 s"), (123.0, "123.0 s")]
)
def test_the_line_of_an_epoch(seconds, text):
    metrics = {"loss": 0.25, "validation_accuracy": None, "test_accuracy": 0.975, "images_per_second": 54321.0}
    console = Console(file=io.StringIO())
    with Display(console, 5) as display, Display(console, 5, "csr-0.1-ft5") as other:
        for each in (display, other):
            each.epoch_end(EpochEnd(2, MLP((784, 10)), {}, [metrics | {"seconds": seconds}]))
    line = f"epoch 2/5  loss 0.2500  test 97.50%  54,321 images/s  {text}\n"
    assert console.file.getvalue() == f"{line}csr-0.1-ft5: {line}"


def test_the_shortest_spelling_of_a_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert shortest(tmp_path / "runs" / "1") == shortest("runs/1") == Path("runs/1")
    assert shortest("/x") == Path("/x")
