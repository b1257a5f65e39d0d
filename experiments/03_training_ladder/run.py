"""Climb the ladder on several networks, and measure the time to an accuracy; write the rows and README's tables.

    python experiments/03_training_ladder/run.py            # on a GPU, about a minute
    python experiments/03_training_ladder/run.py --only cpu # the CPU's rungs, anywhere
    python experiments/03_training_ladder/run.py --table    # the tables again, from the rows that there are

Rows are kept as they come: what a run that was ended has measured is there. Exits with 1 when a backend's losses or its
accuracy are not PyTorch's, or when a recipe misses its own.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from scipy import stats

from qsparse import data, kernels
from qsparse.data import MEAN, STD, Dataset
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import environment
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate
from qsparse.train.ladder import EAGER, ladder

HERE = Path(__file__).resolve().parent
ROWS, ACCURACY_ROWS, CPU_ROWS = HERE / "rows.jsonl", HERE / "accuracy.jsonl", HERE / "cpu.jsonl"
README = HERE / "README.md"
SEEDS = range(5)
NETWORKS = (((256,), 64), ((320, 160), 64), ((1024, 1024), 256), ((256,), 4096))
"""Hidden layers and batch."""
POINTS = 0.2
"""How far the mean accuracy over the seeds may lie from PyTorch's."""


@dataclass(frozen=True)
class Recipe:
    """How to reach an accuracy: 784-256-10, plain gradient descent, the learning rate decaying linearly to zero."""

    target: float
    epochs: int
    lr: float
    batch_size: int = 64


RECIPES = (Recipe(0.97, epochs=1, lr=0.3), Recipe(0.98, epochs=4, lr=0.3))


def climb(dataset: Dataset) -> Iterator[list[dict[str, Any]]]:
    """The ladder's rows, network by network: of all with one seed, PyTorch's slow eager rung too, then of more."""
    for seed in SEEDS:
        for hidden, batch in NETWORKS:
            print(f"784-{'-'.join(map(str, hidden))}-10, batch {batch}, seed {seed}", file=sys.stderr, flush=True)
            config = TrainConfig(hidden=hidden, batch_size=batch, epochs=2, seed=seed)
            rounds, without = (2, ()) if seed == SEEDS[0] else (1, (EAGER,))
            yield ladder(dataset, config, rounds=rounds, say=lambda _: None, device="cuda", without=without).rows


def time_to_accuracy(dataset: Dataset, recipe: Recipe, seed: int) -> dict[str, Any]:
    """Train from the first weights on, the data set on the GPU but in no cache of it; a row with the device's time."""
    train, device = dataset.train, dataset.train.images.device
    model = MLP((784, 256, 10), seed=seed).to(device)
    parameters = torch.nn.utils.parameters_to_vector(model.parameters()).detach()
    steps = -(-len(train) // recipe.batch_size)
    rates = torch.linspace(recipe.lr, 0, recipe.epochs * steps + 1, device=device)[:-1].split(steps)
    orders = [data.order(len(train), seed=seed, epoch=epoch).to(device) for epoch in range(recipe.epochs)]
    flush = torch.empty(256 * 2**20, dtype=torch.uint8, device=device)
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    flush.zero_()
    begin.record()
    for order, rate in zip(orders, rates, strict=True):
        kernels.train_mlp(
            train.images,
            train.labels,
            order,
            rate,
            parameters,
            sizes=model.sizes,
            batch=recipe.batch_size,
            scale=1 / (255 * STD),
            shift=-MEAN / STD,
            precision="high",
        )
    end.record()
    torch.nn.utils.vector_to_parameters(parameters, model.parameters())
    accuracy, _ = evaluate(model, dataset.test)
    return {
        "op": "time_to_accuracy",
        "target": recipe.target,
        "sizes": list(model.sizes),
        "dtype": "tf32",
        "batch_size": recipe.batch_size,
        "lr": recipe.lr,
        "epochs": recipe.epochs,
        "images": len(train),
        "seed": seed,
        "accuracy": accuracy,
        "reached": accuracy >= recipe.target,
        "device_ms": begin.elapsed_time(end),
        **environment(device),
        "timer": "cuda_event",
        "l2": "cold",
    }


def ladder_table(rows: list[dict[str, Any]]) -> str:
    """A line for each network and backend: medians of times, means of accuracies over the seeds."""
    if not rows:
        return "Not measured yet: `python experiments/03_training_ladder/run.py` fills this in."
    lines = [
        "| network | batch | rung | products | epoch, ms | to the graph | to `torch_eager` | accuracy "
        "| points to PyTorch's | seeds |",
        "| --- | ---: | --- | --- | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    for group in _groups(rows):
        first = group[0]
        cells = [f"{'-'.join(map(str, first['sizes']))}", f"{first['batch_size']}", f"`{first['backend']}`"]
        cells.append(first["dtype"])
        for field, form in (("epoch_s", "{:.2f}"), ("ratio", "{:.2f}x"), ("eager_ratio", "{:.1f}x")):
            values = [row[field] for row in group if row[field] is not None]
            scale = 1000 if field == "epoch_s" else 1
            missing = "wrong" if any(row["epoch_s"] is None for row in group) else "-"
            cells.append(form.format(scale * statistics.median(values)) if values and missing == "-" else missing)
        cells.append(f"{statistics.mean(row['accuracy'] for row in group):.2%}")
        cells += [_interval(accuracy_changes(group, rows)), f"{len(group)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, "", f"{_where(rows)} Wall-clock time of training 60,000 images, evaluation left out."))


def _groups(rows: list[dict[str, Any]]) -> list[list[dict[str, Any]]]:
    """The rows of each network and backend."""
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((*row["sizes"], row["batch_size"], row["backend"]), []).append(row)
    return list(groups.values())


def accuracy_changes(group: list[dict[str, Any]], rows: list[dict[str, Any]]) -> list[float]:
    """Test accuracy less that of the row's peer with the same seed, in points, for each seed that both have."""
    peers = {(*row["sizes"], row["batch_size"], row["seed"], row["backend"]): row["accuracy"] for row in rows}
    pairs = [(row, peers.get((*row["sizes"], row["batch_size"], row["seed"], row["peer"]))) for row in group]
    return [100 * (row["accuracy"] - peer) for row, peer in pairs if peer is not None and row["backend"] != row["peer"]]


def _interval(values: list[float]) -> str:
    """The mean, with its interval of 95 % by Student's t where there are several."""
    if not values:
        return "-"
    if len(values) == 1:
        return f"{values[0]:+.2f}"
    half = stats.t.ppf(0.975, len(values) - 1) * statistics.stdev(values) / len(values) ** 0.5
    return f"{statistics.mean(values):+.2f} ± {half:.2f}"


def accuracy_table(rows: list[dict[str, Any]]) -> str:
    """A line for each recipe: the median of times, and the accuracies over the seeds."""
    if not rows:
        return "Not measured yet."
    lines = [
        "| test accuracy | epochs | batch | first rate | device time, ms | accuracy, lowest and mean | seeds |",
        "| ---: | ---: | ---: | ---: | ---: | ---: | ---: |",
    ]
    groups: dict[float, list[dict]] = {}
    for row in rows:
        groups.setdefault(row["target"], []).append(row)
    for target, group in groups.items():
        first, accuracies = group[0], [row["accuracy"] for row in group]
        time = statistics.median(row["device_ms"] for row in group)
        cells = [f"{target:.0%}", f"{first['epochs']}", f"{first['batch_size']}", f"{first['lr']}", f"{time:.2f}"]
        cells += [f"{min(accuracies):.2%}, {statistics.mean(accuracies):.2%}", f"{len(group)}"]
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join((*lines, "", _where(rows)))


def cpu_table(rows: list[dict[str, Any]]) -> str:
    """A line for each rung of the CPU."""
    if not rows:
        return "Not measured yet."
    lines = ["| rung | epoch, s | to `torch` | accuracy |", "| --- | ---: | ---: | ---: |"]
    for row in rows:
        time = "wrong | wrong" if row["epoch_s"] is None else f"{row['epoch_s']:.2f} | {row['ratio']:.2f}x"
        lines.append(f"| `{row['backend']}` | {time} | {row['accuracy']:.2%} |")
    first = rows[0]
    where = f"{first['cpu']}, {first['threads']} threads, PyTorch {first['torch']}, {first['date'][:10]}."
    return "\n".join((*lines, "", f"784-256-10, batch 64. {where}"))


def _where(rows: list[dict[str, Any]]) -> str:
    first = rows[0]
    return f"{first['gpu']}, PyTorch {first['torch']}, CUDA {first['cuda']}, {first['date'][:10]}."


def _read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def _keep(path: Path, batches: Iterator[list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Write rows over what `path` holds, as they come, and return them all."""
    kept = []
    path.write_text("")
    for rows in batches:
        kept += rows
        with path.open("a") as file:
            file.writelines(json.dumps(row, allow_nan=False) + "\n" for row in rows)
    return kept


def publish() -> None:
    """Write the tables into README, between their marks."""
    text = README.read_text()
    tables = {
        "ladder": ladder_table(_read(ROWS)),
        "accuracy": accuracy_table(_read(ACCURACY_ROWS)),
        "cpu": cpu_table(_read(CPU_ROWS)),
    }
    for name, table in tables.items():
        begin, end = f"<!-- {name}: written by run.py -->", f"<!-- end of {name} -->"
        head, rest = text.split(begin)
        text = f"{head}{begin}\n\n{table}\n\n{end}{rest.split(end)[1]}"
    README.write_text(text)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--table", action="store_true", help="only the tables, from the rows")
    parser.add_argument("--only", choices=("ladder", "accuracy", "cpu"), help="measure one of them")
    given = parser.parse_args()
    if given.table:
        publish()
        return 0
    try:
        dataset = data.load("mnist", 0)
        device = resolve_device("cpu" if given.only == "cpu" else "cuda")
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    failed = []
    if given.only == "cpu":
        climbed = ladder(dataset, TrainConfig(epochs=2), rounds=3, say=lambda _: None, device="cpu")
        rows = _keep(CPU_ROWS, iter([climbed.rows]))
        print(cpu_table(rows))
        failed += [f"WRONG: {row['backend']}" for row in rows if row["epoch_s"] is None]
    if given.only in (None, "ladder"):
        rows = _keep(ROWS, climb(dataset))
        print(ladder_table(rows))
        failed += [f"WRONG: {row['backend']} {row['sizes']}" for row in rows if row["epoch_s"] is None]
        for group in _groups(rows):
            changes = accuracy_changes(group, rows)
            if changes and abs(statistics.mean(changes)) > POINTS:
                failed.append(f"UNEQUAL: {group[0]['backend']} {group[0]['sizes']}, {_interval(changes)} points")
    if given.only in (None, "accuracy"):
        there = dataset.to(device)
        time_to_accuracy(there, RECIPES[0], seed=0)  # compiles
        each = ([time_to_accuracy(there, recipe, seed)] for recipe in RECIPES for seed in SEEDS)
        rows = _keep(ACCURACY_ROWS, each)
        print(accuracy_table(rows))
        failed += [f"MISSED: {row['accuracy']:.2%} of {row['target']:.0%}" for row in rows if not row["reached"]]
    publish()
    for each in failed:
        print(each, file=sys.stderr)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
