"""A run and a storage in; the plans that no other beats on the validation split, measured on the test split, out.

Optuna proposes the plans (its tree-structured Parzen estimator: Ozaki et al., "Multiobjective tree-structured Parzen
estimator", 2022) and keeps what was found in a database, so that any number of processes, on any number of machines,
work on one study.
"""

from __future__ import annotations

import contextlib
import dataclasses
import hashlib
import json
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
import sqlalchemy.exc
import torch
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from rich.console import Console

from qsparse import checkpoint
from qsparse.data import Dataset
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.search import plan as plans
from qsparse.search.plan import Choice, Plan
from qsparse.train.config import TrainConfig
from qsparse.train.progress import say
from qsparse.train.run import load_dataset, read_train_config

BASELINE = "baseline"
_DIRECTIONS = (StudyDirection.MAXIMIZE, StudyDirection.MINIMIZE, StudyDirection.MINIMIZE)
_HEARTBEAT_S, _GRACE_S = 30, 120
_ATTEMPTS = 5
"""At making the tables, which two processes may do at the same moment."""


@dataclass(frozen=True)
class SearchConfig:
    """What is searched, and how a plan is judged. All processes of a study must agree on it.

    dtypes: what layers may be, of `plan.DTYPES`. least_density, most_density: of a sparse layer. batch: the batch size
    whose latency counts. budget_s: seconds of timing for each plan (and batch size) on a CPU. finetune_epochs: of
    training after the pruning of a plan.
    Raises UserError for what is out of range.
    """

    dtypes: tuple[str, ...] = plans.DTYPES
    least_density: float = 0.02
    most_density: float = 0.5
    batch: int = 1024
    budget_s: float = 0.3
    finetune_epochs: int = 0

    def __post_init__(self) -> None:
        object.__setattr__(self, "dtypes", tuple(dict.fromkeys(self.dtypes)))
        if not self.dtypes or (unknown := [dtype for dtype in self.dtypes if dtype not in plans.DTYPES]):
            raise UserError(
                f"--dtype names {', '.join(unknown) if self.dtypes else 'nothing'}: give some of "
                f"{', '.join(plans.DTYPES)}, which kernels compute"
            )
        if not 0 < self.least_density <= self.most_density <= 1:
            raise UserError(f"--density is {self.least_density:g} {self.most_density:g}: give LEAST MOST in (0, 1]")
        if not 0 < self.batch < 2**31 or not 0 <= self.finetune_epochs < 2**31 or not 0 < self.budget_s < math.inf:
            raise UserError(
                f"--batch is {self.batch}, --finetune-epochs {self.finetune_epochs}, --budget {self.budget_s}: they "
                "must be at least 1, at least 0, and above 0, none of them without end"
            )

    @property
    def may_prune(self) -> bool:
        """Whether a layer may be sparse: what it then holds are floats."""
        return any(dtype in plans.VALUES for dtype in self.dtypes)


@dataclass(frozen=True)
class Found:
    """The study, how many trials it holds, and the Pareto set: name of a variant -> its plan, and the rows of the test
    split, the baseline's first (none where another process of the study still works, which will measure)."""

    run: Path
    study: str
    storage: str
    trials: int
    plans: dict[str, Plan]
    rows: list[dict[str, Any]]

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse search --json` prints."""
        made = {name: {layer: str(choice) for layer, choice in plan.items()} for name, plan in self.plans.items()}
        return {**dataclasses.asdict(self), "run": str(self.run), "plans": made}


def search(
    run: str | Path | None,
    config: SearchConfig,
    *,
    trials: int = 50,
    storage: str | None = None,
    name: str | None = None,
    seed: int = 0,
    device: str = "auto",
    console: Console | None = None,
) -> Found:
    """Search until the study holds `trials` trials, then measure its Pareto set on the test split, save each model of
    it as RUN/search-<trial> (with a study or a storage of its own, as RUN/search-<study>-<digest>-<trial>), and append
    the rows to the run's rows.jsonl.

    Objectives, all on the validation split: accuracy, latency at `config.batch` as a share of the baseline's timed in
    turn with it (so that machines, and processes that share one, can be compared), and stored bytes.

    run: the run directory; None for the newest. storage: a database's URL as SQLAlchemy takes it; None for a SQLite
    file in the run. name: of the study; None for one of the run's weights. seed: of the proposals: with the number of
    the trial and what was found before, it settles the next.
    A plan that fails is kept with its error, and counts as a trial.
    Raises UserError for a run that is not there or not done, or has no validation split, a storage that cannot be
    opened, and a study that was begun with another `config`, another run or on another device.
    """
    if trials < 1:
        raise UserError(f"--trials is {trials}: it must be at least 1")
    run = checkpoint.find_run(run)
    target = resolve_device(device, lambda sentence: say(console, sentence))
    model = checkpoint.load(run, target)
    dataset = load_dataset(run, console).to(target)
    if not len(dataset.validation):
        raise UserError("The run has no validation split to search on: train with --validation above 0.")
    checkpoint.require_writable(run)
    weights = hashlib.blake2b((run / checkpoint.MODEL).read_bytes(), digest_size=4).hexdigest()
    for option, given in (("--storage", storage), ("--study", name)):
        if given == "":
            raise UserError(f"{option} is empty: name one, or leave it out")
    label = _label(storage, name)
    storage = storage or f"sqlite:///{run / 'search.db'}"
    job = _Job(run, model, dataset, target, config, seed, console, label)
    with _quiet():
        study = _open(storage, name or f"qsparse-{weights}", {"weights": weights, "device": target.type, **job.terms})
        done = _count(study)
        say(console, f"study {study.study_name} in {storage}: {done} of {trials} trials are done")

        def enough(study: optuna.Study, _: FrozenTrial) -> None:
            if _count(study) >= trials:
                study.stop()

        if done < trials:
            study.optimize(job.objectives, callbacks=[job.report, enough], catch=(UserError, RuntimeError, ValueError))
        optuna.storages.fail_stale_trials(study)
        count = _count(study)
        if study.get_trials(deepcopy=False, states=(TrialState.RUNNING,)):
            say(
                console,
                "another process still works on this study: the last one measures the Pareto set (where it was killed: "
                f"this command, in {_GRACE_S // 60} minutes)",
            )
            return Found(run, study.study_name, storage, count, {}, [])
        front = _front(study.best_trials)
    if not front:
        raise UserError(
            f"none of the {count} trials could be measured; the study {study.study_name} holds their errors"
        )
    made = {job.variant(trial): _plan(trial) for trial in front}
    return Found(run, study.study_name, storage, count, made, job.measure_all(front))


@dataclass(frozen=True)
class _Job:
    """What every trial needs."""

    run: Path
    model: MLP
    dataset: Dataset
    device: torch.device
    config: SearchConfig
    seed: int
    console: Console | None
    label: str

    def variant(self, trial: FrozenTrial) -> str:
        """The name of what a trial proposed."""
        return f"{self.label}-{trial.number}"

    @property
    def terms(self) -> dict[str, Any]:
        return {**dataclasses.asdict(self.config), "dtypes": list(self.config.dtypes)}

    @property
    def training(self) -> TrainConfig | None:
        """How a pruned model is trained on: as the run was."""
        if not self.config.finetune_epochs:
            return None
        own = read_train_config(self.run)
        return dataclasses.replace(own, backend="auto", epochs=self.config.finetune_epochs)

    def objectives(self, trial: optuna.Trial) -> tuple[float, float, float]:
        trial.study.sampler = _sampler(self.seed, trial.number, list(self.model.layers()), self.config.dtypes)
        config = self.config
        plan = plans.suggest(trial, list(self.model.layers()), config.dtypes, config.least_density, config.most_density)
        trial.set_user_attr("plan", {layer: dataclasses.asdict(choice) for layer, choice in plan.items()})
        try:
            _, row = measure(
                {BASELINE: self.model, "plan": plans.build(self.model, plan, self.dataset, self.training)},
                self.dataset.validation,
                device=self.device,
                batches=(config.batch,),
                budget_s=config.budget_s,
                peers=False,
            )
        except KeyboardInterrupt:
            raise KeyboardInterrupt(
                f"interrupted: the study {trial.study.study_name} keeps its trials, and the same command goes on"
            ) from None
        except Exception as error:
            trial.set_user_attr("error", f"{type(error).__name__}: {error}")
            raise
        batch = str(config.batch)
        trial.set_user_attr("latency_us", row["latency_us"][batch])
        return row["accuracy"], 1 / row["speedup"][batch], row["weight_bytes"]

    def report(self, study: optuna.Study, trial: FrozenTrial) -> None:
        """Say what came of a trial."""
        if trial.values is None:
            found = trial.user_attrs.get("error", "failed")
        else:
            accuracy, latency, size = trial.values
            found = f"{accuracy:.2%}, {1 / latency:.2f}x, {size:,.0f} bytes"
        made = ", ".join(f"{layer} {choice}" for layer, choice in _plan(trial).items())
        say(self.console, f"trial {trial.number}: {made}: {found}")

    def measure_all(self, front: Sequence[FrozenTrial]) -> list[dict[str, Any]]:
        """The rows of the trials in `front` on the test split; their models are saved."""
        say(self.console, f"measuring the {len(front)} plans that no other beats on the test split ...")
        models, facts = {}, {}
        seed = read_train_config(self.run).seed
        for trial in front:
            name, plan = self.variant(trial), _plan(trial)
            models[name] = plans.build(self.model, plan, self.dataset, self.training)
            details = {
                "layers": {layer: str(choice) for layer, choice in plan.items()},
                "trial": trial.number,
                "validation_accuracy": trial.values[0],
                "finetune_epochs": self.config.finetune_epochs,
            }
            extra = {"run": str(self.run), "variant": name, **details}
            file = checkpoint.save_model(self.run / name, models[name], extra)
            facts[name] = {**details, "file_bytes": file.stat().st_size, "seed": seed}
        facts[BASELINE] = {"file_bytes": (self.run / checkpoint.MODEL).stat().st_size, "seed": seed}
        rows = measure(
            {BASELINE: self.model, **models},
            self.dataset.test,
            device=self.device,
            run=str(self.run),
            details=facts,
            budget_s=self.config.budget_s,
        )
        checkpoint.append_rows(self.run, rows)
        return rows


def _sampler(seed: int, number: int, layers: list[str], dtypes: Sequence[str]) -> optuna.samplers.BaseSampler:
    """What proposes trial `number`: first all layers alike, once in each dtype, then what the estimator expects.

    A generator of its own for each trial: two processes with one would propose the same plans.
    """
    digest = hashlib.blake2b(f"{seed} {number}".encode(), digest_size=4).digest()
    sampler = optuna.samplers.TPESampler(seed=int.from_bytes(digest))
    if number >= len(dtypes):
        return sampler
    fixed = {f"{layer} stored": "dense" for layer in layers} | {f"{layer} dtype": dtypes[number] for layer in layers}
    return optuna.samplers.PartialFixedSampler(fixed, sampler)


def _open(url: str, name: str, terms: dict[str, Any]) -> optuna.Study:
    """The study `name`, made where there is none. Raises UserError where it was begun on other terms, or by others."""
    if url.startswith("sqlite") and url.partition("://")[2] in ("", "/", "/:memory:"):
        raise UserError(f"--storage {url} is a database in memory, which is lost: give a file, as sqlite:///search.db")
    for attempt in range(_ATTEMPTS):
        try:
            waiting = {"connect_args": {"timeout": 60}} if url.startswith("sqlite") else {}
            storage = optuna.storages.RDBStorage(
                url, engine_kwargs=waiting, heartbeat_interval=_HEARTBEAT_S, grace_period=_GRACE_S
            )
            study = optuna.create_study(storage=storage, study_name=name, directions=_DIRECTIONS, load_if_exists=True)
            break
        except (sqlalchemy.exc.SQLAlchemyError, optuna.exceptions.StorageInternalError, ImportError) as error:
            if attempt + 1 == _ATTEMPTS or isinstance(error, sqlalchemy.exc.ArgumentError | ImportError):
                raise UserError(f"--storage {url} cannot be opened: {str(error).splitlines()[0]}") from error
    begun = study.user_attrs.get("terms")
    foreign = begun is None and study.get_trials(deepcopy=False)
    if foreign or not isinstance(begun, dict | None) or tuple(study.directions) != _DIRECTIONS:
        raise UserError(f"the study {name} in {url} is not one of `qsparse search`: give another --study")
    if begun is None:
        study.set_user_attr("terms", terms)
    elif json.loads(json.dumps(terms)) != begun:
        other = [key for key in terms if json.loads(json.dumps(terms[key])) != begun.get(key)]
        raise UserError(
            f"the study {name} was begun with another {', '.join(other)} "
            f"({', '.join(str(begun.get(key)) for key in other)}): give the same, or another --study"
        )
    return study


def _count(study: optuna.Study) -> int:
    """How many trials were measured, or failed; one that was interrupted, or whose process died, is none."""
    trials = study.get_trials(deepcopy=False)
    return sum(trial.state == TrialState.COMPLETE or "error" in trial.user_attrs for trial in trials)


def _plan(trial: FrozenTrial) -> Plan:
    return {layer: Choice(**choice) for layer, choice in trial.user_attrs.get("plan", {}).items()}


def _label(storage: str | None, name: str | None) -> str:
    """What the variants of a study are named after: "search", and what else tells it from others of the run."""
    given = [text for text in (name, storage) if text is not None]
    if not given:
        return "search"
    digest = hashlib.blake2b("\n".join(given).encode(), digest_size=3).hexdigest()
    return f"search-{re.sub('[^A-Za-z0-9]', '_', name or '')[:40] or 'elsewhere'}-{digest}"


def _front(best: Sequence[FrozenTrial]) -> list[FrozenTrial]:
    """The Pareto set, of equal plans the first, the most accurate ones before others."""
    first: dict[str, FrozenTrial] = {}
    for trial in sorted(best, key=lambda trial: trial.number):
        first.setdefault(json.dumps(trial.user_attrs["plan"], sort_keys=True), trial)
    return sorted(first.values(), key=lambda trial: (-trial.values[0], trial.values[2], trial.number))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Optuna's own lines and its warnings about experimental features are not ours."""
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            yield
    finally:
        optuna.logging.set_verbosity(verbosity)
