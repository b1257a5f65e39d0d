"""The training ladder: one network, one seed, the same batches, by every backend that this machine runs.

A backend is timed only where its losses are PyTorch's; the rows say the time of an epoch, and its ratio to PyTorch's.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import partial
from typing import IO, Any

import numpy as np
from rich import box
from rich.console import Console
from rich.table import Table

from qsparse.data import Dataset, Split
from qsparse.device import missing_for_cuda, resolve_device
from qsparse.errors import UserError
from qsparse.measure import environment
from qsparse.models import MLP
from qsparse.timing import percentile
from qsparse.train import backends, c_backend, torch_peers
from qsparse.train.config import TrainConfig
from qsparse.train.fit import Progress, fit

PEERS = {"cpu": "torch", "cuda": "torch_graph", "bfloat16": "torch_graph_bf16"}
"""PyTorch's rung on each device, and of the backends on a GPU that multiply in bfloat16."""
PRECISIONS = {"cuda": ("fp32", "float32"), "cuda_tf32": ("tf32", "tf32"), "cuda_bf16": ("bf16", "bfloat16")}
"""Our rungs on a GPU: their precision, and what its products are called in a row."""
EAGER = "torch_eager"
"""PyTorch on a GPU as a user writes it, the other peer there, in tf32."""
TOLERANCES = {"float32": 1e-3, "tf32": 1e-2, "bfloat16": 5e-2}
"""How far the mean loss of some steps may lie from PyTorch's on the CPU, in nats: training amplifies roundings ..."""
COMPARED_STEPS = 200
"""... in these first steps of a run: later ones drift apart by rounding alone."""
_WARMUP_BATCHES = 4


@dataclass(frozen=True)
class Ladder:
    """What was measured: a row for each rung, and those whose losses are not PyTorch's."""

    rows: list[dict[str, Any]]

    @property
    def wrong(self) -> list[str]:
        return [row["backend"] for row in self.rows if row["epoch_s"] is None]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse ladder --json` prints."""
        return {"rows": self.rows, "wrong": self.wrong}


class _EnoughError(Exception):
    """A run has taken the steps that are compared."""


@dataclass
class _Rung:
    """One backend: its settings, its data, and what its runs gave."""

    config: TrainConfig
    dataset: Dataset
    make: Callable[..., backends.Backend] = backends.make
    dtype: str = "float32"
    seconds: list[float] = dataclasses.field(default_factory=list)
    losses: list[float] = dataclasses.field(default_factory=list)
    accuracy: float | None = None

    def run(self) -> None:
        """Train from the first weights on, and keep the time of each epoch and the losses of the first steps."""
        self.losses = []
        metrics = fit(self._model(), self.dataset, self.config, progress=self._keep, make=self.make)
        self.seconds += [epoch["seconds"] for epoch in metrics]
        self.accuracy = metrics[-1]["test_accuracy"]

    def compare(self) -> None:
        """Take the first steps alone, and keep their losses."""

        def keep(now: Progress) -> None:
            self._keep(now)
            if now.epoch > 1 or now.step >= COMPARED_STEPS:
                raise _EnoughError

        self.losses = []
        with contextlib.suppress(_EnoughError):
            fit(self._model(), self.dataset, self.config, progress=keep, make=self.make)

    def _keep(self, now: Progress) -> None:
        if now.epoch == 1 and now.step <= COMPARED_STEPS:
            self.losses.append(now.loss)

    def warm_up(self) -> None:
        """Take a few steps, so that no counted epoch starts threads or compiles a kernel."""
        rows = _WARMUP_BATCHES * self.config.batch_size
        few = Split(self.dataset.train.images[:rows], self.dataset.train.labels[:rows])
        dataset, config = dataclasses.replace(self.dataset, train=few), dataclasses.replace(self.config, epochs=1)
        fit(self._model(), dataset, config, make=self.make)

    def _model(self) -> MLP:
        return MLP((784, *self.config.hidden, 10), seed=self.config.seed).to(self.dataset.train.images.device)


def runnable(device: str, say: Callable[[str], None]) -> list[str]:
    """Return the rungs that this machine runs on `device` (auto: on any); say why the others do not."""
    found = []
    if device != "cuda":
        found += ["torch", "numpy"]
        try:
            c_backend.load()
            found.append("c")
        except UserError as error:
            say(f"c is left out: {error}")
    missing = missing_for_cuda()
    if device == "cuda" and missing:
        raise UserError(f"--device cuda: {missing}")
    if device != "cpu":
        if missing:
            say(f"cuda is left out: {missing}")
        else:
            found += [EAGER, "torch_graph", "torch_graph_bf16", *PRECISIONS]
    return found


def _rung(name: str, dataset: Dataset, config: TrainConfig) -> _Rung:
    """Make a rung; `dataset` is on its device."""
    device = dataset.train.images.device.type
    peers = {
        EAGER: (torch_peers.EagerTorch, "tf32"),
        "torch_graph": (torch_peers.GraphedTorch, "tf32"),
        "torch_graph_bf16": (torch_peers.GraphedBfloat16, "bfloat16"),
    }
    if name in peers:
        return _Rung(dataclasses.replace(config, backend="torch", device=device), dataset, *peers[name])
    if name in PRECISIONS:
        precision, dtype = PRECISIONS[name]
        ours = dataclasses.replace(config, backend="cuda", device=device, precision=precision)
        return _Rung(ours, dataset, dtype=dtype)
    return _Rung(dataclasses.replace(config, backend=name, device=device), dataset)


def ladder(
    dataset: Dataset,
    config: TrainConfig,
    *,
    rounds: int,
    say: Callable[[str], None],
    device: str = "auto",
    without: Collection[str] = (),
) -> Ladder:
    """Train `config` by every backend in turn, `rounds` times over, and return a row for each.

    dataset: on the CPU; backends of the GPU get a copy there. config: its backend, device and precision are not looked
    at. device: cpu and cuda leave out what runs on the other; with cuda, PyTorch on the CPU takes the first steps only,
    for their losses. without: rungs to leave out, no peer of a device among them. Times are wall-clock times of an
    epoch's training, without the evaluation; a row has their median.

    Raises UserError when a run diverges, and for a GPU that is not there; ValueError for such a peer in `without`.
    """
    names = runnable(device, say)
    if left_out := [name for name in names if name in without and name in PEERS.values()]:
        raise ValueError(f"{left_out[0]} is what others are compared with: it cannot be left out")
    names = [name for name in names if name not in without]
    on_gpu = {name for name in names if name.startswith(("torch_", "cuda"))}
    there = dataset.to(resolve_device("cuda")) if on_gpu else dataset
    rungs = {name: _rung(name, there if name in on_gpu else dataset, config) for name in names}
    for rung in rungs.values():
        rung.warm_up()
    reference = rungs.get("torch") or _rung("torch", dataset, config)
    if "torch" not in rungs:
        say("the losses of PyTorch on the CPU")
        reference.compare()
    for number in range(1, rounds + 1):
        for name, rung in rungs.items():  # in turn: a change of clock or load falls on all of them
            say(f"round {number} of {rounds}: {name}")
            rung.run()
    return Ladder([_row(name, rung, rungs, reference.losses, rounds) for name, rung in rungs.items()])


def _row(name: str, rung: _Rung, rungs: dict[str, _Rung], losses: list[float], rounds: int) -> dict[str, Any]:
    config, images = rung.config, len(rung.dataset.train)
    error = max(abs(ours - theirs) for ours, theirs in zip(rung.losses, losses, strict=True))
    right = error < TOLERANCES[rung.dtype]
    at = partial(percentile, rung.seconds)
    peer = PEERS.get(rung.dtype, PEERS[config.device])
    peer_s = percentile(rungs[peer].seconds, 50)
    same = config.device == "cuda" and rung.dtype != "bfloat16" and EAGER in rungs
    eager_s = percentile(rungs[EAGER].seconds, 50) if same else None
    return {
        "op": "train",
        "backend": name,
        "sizes": [784, *config.hidden, 10],
        "dtype": rung.dtype,
        "batch_size": config.batch_size,
        "lr": config.lr,
        "momentum": config.momentum,
        "weight_decay": config.weight_decay,
        "seed": config.seed,
        "epochs": config.epochs,
        "rounds": rounds,
        "dataset": rung.dataset.name,
        "images": images,
        "accuracy": rung.accuracy,
        "loss_error": error,
        "epoch_s": at(50) if right else None,
        "epoch_s_p10": at(10) if right else None,
        "epoch_s_p90": at(90) if right else None,
        "images_per_s": images / at(50) if right else None,
        "peer": peer,
        "peer_device": config.device,
        "peer_s": peer_s,
        "ratio": peer_s / at(50) if right else None,
        "eager_s": eager_s,
        "eager_ratio": eager_s / at(50) if right and eager_s else None,
        "device": config.device,
        **environment(rung.dataset.train.images.device),
        "timer": "wall",
        "l2": None,
        "numpy": np.__version__,
    }


def show(rows: list[dict[str, Any]], file: IO[str]) -> None:
    """Print the rows as a table to `file`."""
    table = Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("backend")
    table.add_column("device")
    for heading in ("epoch", "images/s", "accuracy", "ratio", "to eager"):
        table.add_column(heading, justify="right")
    for row in rows:
        wrong = row["epoch_s"] is None
        table.add_row(
            row["backend"],
            row["device"],
            f"wrong by {row['loss_error']:.2g}" if wrong else f"{row['epoch_s']:.3g} s",
            "-" if wrong else f"{row['images_per_s']:,.0f}",
            f"{row['accuracy']:.2%}",
            "-" if wrong else f"{row['ratio']:.2f}x",
            f"{row['eager_ratio']:.1f}x" if row["eager_ratio"] else "-",
        )
    Console(file=file, width=80).print(table)
    first = rows[0]
    sizes = "-".join(map(str, first["sizes"]))
    print(f"{sizes}, batch {first['batch_size']}, {first['images']:,} images of {first['dataset']}.", file=file)
    epochs = first["epochs"] * first["rounds"]
    print(f"Median wall-clock time of {epochs} epoch{'s' * (epochs > 1)}, the backends in turn.", file=file)
    print("Ratio: time of PyTorch on that device (GPU: torch_graph, or its bf16) over this.", file=file)
    print("To eager: the time of torch_eager over this.", file=file)
