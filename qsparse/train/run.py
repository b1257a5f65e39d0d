"""A whole training run: its directory, its data, a checkpoint each epoch, and going on after an interruption."""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import hashlib
import os
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from qsparse import __version__, checkpoint, data
from qsparse.data import Dataset
from qsparse.device import missing_for_cuda, resolve_device
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.train import c_backend, parallel
from qsparse.train.config import TrainConfig, option
from qsparse.train.fit import EpochEnd, FitState, fit
from qsparse.train.progress import Display, say

INPUTS = 784
CLASSES = 10
_DEVICES = {"torch": "cpu", "numpy": "cpu", "c": "cpu", "cuda": "cuda"}
"""Where each backend but auto computes."""
NAMED_DATA = ("mnist", "mnist-5k")


@dataclass(frozen=True)
class TrainedRun:
    """A finished run: its directory, its config.json, and the metrics of each epoch (see `fit`)."""

    run: Path
    config: dict[str, Any]
    metrics: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse train --json` prints."""
        last = self.metrics[-1]
        return {
            "run": str(self.run),
            "test_accuracy": last["test_accuracy"],
            "validation_accuracy": last["validation_accuracy"],
            "seconds": sum(epoch["seconds"] for epoch in self.metrics),
            "epochs": self.metrics,
            "config": self.config,
        }


def train(
    config: TrainConfig,
    *,
    out: str | Path | None = None,
    force: bool = False,
    console: Console | None = None,
) -> TrainedRun | None:
    """Train a new run. Of the processes that torchrun started, rank 0 writes it, and the others return None.

    out: its directory; left out, the next number under runs/. force: replace the run that `out` holds, but only once
    the new one can start. console: where progress goes (nowhere when left out).

    Raises UserError for an `out` that holds a run (without force), that another process trains in or that cannot be
    written, for a device or data that are not there, and for a loss that is not finite; KeyboardInterrupt, saying what
    is saved, when interrupted.
    """
    with parallel.joined():
        return _train_new(config, out, force, console if parallel.rank() == 0 else None)


def _train_new(config: TrainConfig, out: str | Path | None, force: bool, console: Console | None) -> TrainedRun | None:
    """Train a new run as one of the ranks."""
    if parallel.rank() == 0:
        if out is not None:
            _replaces(Path(out), force)
        checkpoint.require_writable(checkpoint.RUNS if out is None else out)
    config, device = _place(config, console)
    dataset = data.load(config.data, config.validation, partial(say, console))

    config = dataclasses.replace(config, data=_name_again(config.data, dataset), validation=len(dataset.validation))
    model = _new_model(config).to(device)
    if parallel.rank():
        return _follow(model, dataset.to(device), config, FitState())

    run = checkpoint.new_run() if out is None else checkpoint.make_directory(out)
    with checkpoint.exclusive(run):
        if _replaces(run, force):  # asked again: another process may have begun a run there meanwhile
            checkpoint.require_room(run, model)
            checkpoint.clear_run(run)
        checkpoint.write_config(
            run,
            {
                "qsparse": __version__,
                "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
                "train": config.to_json(),
                "dataset": identity(dataset),
            },
            model,
        )
        say(console, f"{run}: {_title(config, dataset)}")
        return _train(run, model, dataset.to(device), config, FitState(), console)


def _replaces(run: Path, force: bool) -> bool:
    """Whether a new run in `run` replaces one. Raises UserError where it must not."""
    if not checkpoint.holds_run(run):
        return False
    if not force:
        raise UserError(
            f"{run} already holds a run: go on with it by --resume, replace it by --force, or choose another --out"
        )
    checkpoint.require_own(run)
    return True


def resume(
    given: Mapping[str, Any], *, out: str | Path | None = None, console: Console | None = None
) -> TrainedRun | None:
    """Go on with the run in `out` (left out: the newest under runs/) after its last finished epoch.

    The weights come out bit for bit as without the interruption, or, by another number of processes, within float
    noise. A run that is done is returned as it is; a rank other than 0 returns None, as of `train`.
    given: the settings (fields of TrainConfig) that the user named; they must be the run's.

    Raises UserError when there is no such run, when another process trains in it, when a setting contradicts the run's,
    or when the data are not those that it began with; KeyboardInterrupt as `train`.
    """
    with parallel.joined():
        return _resume(given, out, console if parallel.rank() == 0 else None)


def _resume(given: Mapping[str, Any], out: str | Path | None, console: Console | None) -> TrainedRun | None:
    """Go on with a run as one of the ranks."""
    run = checkpoint.find_run(out)
    config = read_train_config(run)
    _refuse_contradictions(run, config, given)
    with checkpoint.exclusive(run) if parallel.rank() == 0 else contextlib.nullcontext():
        if checkpoint.is_finished(run):
            say(console, f"{run} is done: all {config.epochs} epochs are trained")
            if parallel.rank():
                return None
            return TrainedRun(run, checkpoint.read_config(run), checkpoint.read_metrics(run))
        if parallel.rank() == 0:
            checkpoint.require_writable(run)
        config, device = _place(config, console)
        dataset = load_dataset(run, console)
        model = _new_model(config).to(device)
        saved = checkpoint.load_checkpoint(run, model)
        state = FitState() if saved is None else FitState(saved.momentum, saved.metrics)
        if parallel.rank():
            return _follow(model, dataset.to(device), config, state)
        say(console, f"{run}: {_title(config, dataset)}, going on after epoch {len(state.metrics)} of {config.epochs}")
        return _train(run, model, dataset.to(device), config, state, console)


def _follow(model: MLP, dataset: Dataset, config: TrainConfig, state: FitState) -> None:
    """Train with rank 0, which writes what comes of it."""
    fit(model, dataset, config, start_epoch=len(state.metrics), state=state)


def _train(
    run: Path, model: MLP, dataset: Dataset, config: TrainConfig, state: FitState, console: Console | None
) -> TrainedRun:
    """Train what is left of the run, a checkpoint an epoch, and write the model at the end."""
    done = len(state.metrics)
    try:
        with Display(console or Console(quiet=True), config.epochs) as display:

            def on_epoch(end: EpochEnd) -> None:
                nonlocal done
                checkpoint.save_checkpoint(run, end.model, end.momentum, end.metrics)
                done = end.epoch
                checkpoint.write_metrics(run, end.metrics)
                display.epoch_end(end)

            metrics = fit(
                model,
                dataset,
                config,
                start_epoch=done,
                state=state,
                on_epoch=on_epoch,
                progress=display.progress,
            )
        checkpoint.write_metrics(run, metrics)
        checkpoint.write_weights(run, model)
    except KeyboardInterrupt:
        raise KeyboardInterrupt(f"interrupted: {_saved(run, done, config)}") from None
    except parallel.RankGoneError as error:
        raise UserError(f"{error}: {_saved(run, done, config)}") from None
    checkpoint.drop_checkpoint(run)
    return TrainedRun(run, checkpoint.read_config(run), metrics)


def _saved(run: Path, done: int, config: TrainConfig) -> str:
    saved = f"epoch {done} of {config.epochs} is saved" if done else "no epoch was finished, so nothing is saved"
    return f"{saved} in {run}; go on with `qsparse train --resume --out {run}`"


def read_train_config(run: Path) -> TrainConfig:
    """Return the settings that `run` was trained with. Raises UserError when its config.json does not hold them."""
    try:
        config = TrainConfig.from_json(checkpoint.read_config(run)["train"])
    except (KeyError, TypeError, UserError) as error:
        raise UserError(f"{run / checkpoint.CONFIG} does not hold the settings of a qsparse run: {error}") from error
    if config.backend == "auto":  # written before there was a choice
        return dataclasses.replace(config, backend="cuda" if config.device == "cuda" else "torch")
    return config


def load_dataset(run: Path, console: Console | None = None) -> Dataset:
    """Load the very data that `run` was trained with. console: where a fallback or a download is said aloud.

    A directory that is gone by now may stand elsewhere: then it is looked for as by `--data auto`. MNIST is read where
    the training found it while that is there, unless $QSPARSE_DATA is set.
    Raises UserError when they are not to be had, or are other data by now: an accuracy on these would mean nothing.
    """
    config = read_train_config(run)
    here = config.data in NAMED_DATA or Path(config.data).is_dir()
    was = checkpoint.read_config(run).get("dataset")
    source = was.get("source") if isinstance(was, dict) else "unknown data"
    dataset, known = None, isinstance(source, str) and Path(source).is_dir()
    if config.data == "mnist" and known and not os.environ.get("QSPARSE_DATA"):
        with contextlib.suppress(UserError):
            dataset = data.load(source, config.validation, partial(say, console))
    try:
        if dataset is None or dataset.name != "mnist":
            dataset = data.load(config.data if here else "auto", config.validation, partial(say, console))
    except UserError as error:
        raise UserError(f"{error}; {run} was trained on {source}") from None
    if not isinstance(was, dict) or was.get("digest") != identity(dataset)["digest"]:
        raise UserError(
            f"{run} was trained on other data ({source}) than are here now ({dataset.source}): "
            "bring those back (QSPARSE_DATA can point at them), or train a new run"
        )
    return dataset


def identity(dataset: Dataset) -> dict[str, Any]:
    """Return a JSON-able dict that identifies the data: name, source, images in each split, a digest of them all."""
    digest = hashlib.blake2b(digest_size=16)
    for split in (dataset.train, dataset.validation, dataset.test):
        for tensor in (split.images, split.labels):
            digest.update(tensor.cpu().numpy())
    return {
        "name": dataset.name,
        "source": dataset.source,
        "train": len(dataset.train),
        "validation": len(dataset.validation),
        "test": len(dataset.test),
        "digest": digest.hexdigest(),
    }


def _place(config: TrainConfig, console: Console | None) -> tuple[TrainConfig, torch.device]:
    """Return `config` with its backend and its device chosen, and that device.

    Raises UserError when they exclude each other, or cannot run here.
    """
    if config.backend == "cuda":
        if config.device == "cpu":
            raise UserError("--backend cuda computes on a GPU: leave --device cpu out, or take another --backend")
        if missing := missing_for_cuda():
            raise UserError(f"--backend cuda: {missing}; or leave --backend out to run on the CPU")
    if _DEVICES.get(config.backend) == "cpu" and config.device == "cuda":
        raise UserError(f"--backend {config.backend} computes on the CPU: leave --device out, or take --backend cuda")
    if config.backend in ("numpy", "c") and parallel.size() > 1:
        raise UserError(f"--backend {config.backend} trains in one process, and torchrun started {parallel.size()}")
    device = resolve_device(_DEVICES.get(config.backend, config.device), partial(say, console))
    if device.type == "cuda" and parallel.size() > 1 and int(os.environ["LOCAL_RANK"]) >= torch.cuda.device_count():
        raise UserError(f"torchrun started more processes than there are GPUs here ({torch.cuda.device_count()})")
    backend = ("cuda" if device.type == "cuda" else "torch") if config.backend == "auto" else config.backend
    if config.precision != "fp32" and (backend != "cuda" or parallel.size() > 1):
        raise UserError(f"--precision {config.precision} is for --backend cuda in one process: leave it out")
    if backend == "c":
        c_backend.load()  # compiled, or refused, before a directory is made
    return dataclasses.replace(config, backend=backend, device=device.type), device


def _name_again(asked: str, dataset: Dataset) -> str:
    """Return the `--data` that finds `dataset` again from any directory, without the choices that `auto` has."""
    if asked == "auto":
        return dataset.name if dataset.name != "custom" else str(Path(dataset.source).absolute())
    return asked if asked in NAMED_DATA else str(Path(asked).expanduser().absolute())


def _refuse_contradictions(run: Path, config: TrainConfig, given: Mapping[str, Any]) -> None:
    """Raise UserError when a setting in `given` is not the run's own."""
    for field, value in given.items():
        own = getattr(config, field)
        if field == "hidden":
            value = tuple(value)
        if field == "data" and value not in ("auto", *NAMED_DATA):
            value = str(Path(value).expanduser().absolute())
        if value == own or (field in ("device", "data", "backend") and value == "auto"):
            continue
        why = " (its learning rate decays over that many)" if field == "epochs" else ""
        raise UserError(
            f"{run} was begun with {option(field)} {_spell(own)}{why}, and {_spell(value)} would give other weights: "
            f"leave {option(field)} out to resume it, or train a new run"
        )


def _spell(value: object) -> str:
    return ("+".join(map(str, value)) or "0") if isinstance(value, tuple) else str(value)


def _new_model(config: TrainConfig) -> MLP:
    try:
        return MLP((INPUTS, *config.hidden, CLASSES), seed=config.seed)
    except RuntimeError as error:  # PyTorch could not allocate
        raise UserError(f"--hidden {_spell(config.hidden)} is too large for this machine's memory") from error


def _title(config: TrainConfig, dataset: Dataset) -> str:
    sizes = "-".join(map(str, (INPUTS, *config.hidden, CLASSES)))
    where = config.device if config.backend in ("torch", "cuda") else f"{config.device}, backend {config.backend}"
    return f"{sizes} on {len(dataset.train):,} images of {dataset.name} ({dataset.source}), {where}"
