"""The search: it judges on the validation split, shares its work, and measures its Pareto set on the test split."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys

import optuna
import pytest
from typer.testing import CliRunner

import qsparse
from qsparse import checkpoint, cli, data
from qsparse.errors import UserError
from qsparse.search import study as studies
from qsparse.search.study import SearchConfig, search
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

QUICK = SearchConfig(batch=8, budget_s=0.001)


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return train(TrainConfig(hidden=(16,), epochs=1, data="mnist-5k", device="cpu")).run


@pytest.fixture
def asked(monkeypatch):
    """The splits that `measure` was given, which is hurried."""
    splits = []

    def hurried(models, split, **options):
        splits.append(split)
        return measured(models, split, **{**options, "batches": options.get("batches", (1,)), "budget_s": 0.001})

    measured = studies.measure
    monkeypatch.setattr(studies, "measure", hurried)
    return splits


def trials_of(run):
    storage = f"sqlite:///{run / 'search.db'}"
    return optuna.load_study(study_name=None, storage=storage)


def test_it_judges_on_the_validation_split_and_reports_the_test_split(run, asked):
    found = search(run, QUICK, trials=7, device="cpu")
    dataset = data.load("mnist-5k")
    assert [len(split) for split in asked] == [len(dataset.validation)] * 7 + [len(dataset.test)]
    assert found.trials == 7
    study = trials_of(run)
    assert len(study.trials) == 7
    best = {trial.number for trial in study.best_trials}
    assert {int(name.removeprefix("search-")) for name in found.plans} <= best
    assert [row["variant"] for row in found.rows] == ["baseline", *found.plans]
    assert checkpoint.read_rows(run) == found.rows
    for row in found.rows[1:]:
        model = qsparse.load(run / row["variant"])
        right = (model(dataset.test.images).argmax(dim=1) == dataset.test.labels).float().mean()
        assert row["accuracy"] == pytest.approx(float(right))
        assert row["validation_accuracy"] == study.trials[row["trial"]].values[0]
        assert row["layers"] == {name: str(choice) for name, choice in found.plans[row["variant"]].items()}
        assert row["file_bytes"] == (run / row["variant"] / "model.safetensors").stat().st_size


def test_the_first_trials_are_the_uniform_ones(run, asked):
    found = search(run, SearchConfig(batch=8, dtypes=("bf16", "int8")), trials=2, device="cpu")
    plans = [trial.user_attrs["plan"] for trial in trials_of(run).trials]
    assert [{choice["dtype"] for choice in plan.values()} for plan in plans] == [{"bf16"}, {"int8"}]
    assert all(choice["density"] is None for plan in plans for choice in plan.values())
    assert len(found.plans) in (1, 2)


def test_it_goes_on_where_it_was(run, asked):
    search(run, QUICK, trials=3, device="cpu")
    assert search(run, QUICK, trials=5, device="cpu").trials == 5
    assert search(run, QUICK, trials=5, device="cpu").trials == 5
    assert len(asked) == 3 + 1 + 2 + 1 + 0 + 1


def test_a_seed_settles_the_proposals(run, monkeypatch):
    def same(models, split, **options):  # no clock
        return [{"speedup": {"8": 1.0}, "latency_us": {"8": 1.0}, "accuracy": 0.5, "weight_bytes": 1}] * 2

    monkeypatch.setattr(studies, "measure", same)
    monkeypatch.setattr(checkpoint, "append_rows", lambda run, rows: None)
    plans = []
    for seed, name in ((0, "a"), (0, "b"), (1, "c")):
        url = f"sqlite:///{name}.db"
        search(run, QUICK, trials=9, seed=seed, storage=url, device="cpu")
        plans.append([trial.params for trial in optuna.load_study(study_name=None, storage=url).trials])
    assert plans[0] == plans[1]
    assert plans[0] != plans[2]


def test_a_plan_that_fails_is_a_trial_with_its_error(run, asked, monkeypatch):
    built = studies.plans.build

    def build(model, plan, *more):
        if any(choice.dtype == "fp16" for choice in plan.values()):
            raise UserError("no fp16 today")
        return built(model, plan, *more)

    monkeypatch.setattr(studies.plans, "build", build)
    found = search(run, QUICK, trials=4, device="cpu")
    failed = [trial for trial in trials_of(run).trials if trial.values is None]
    assert [trial.user_attrs["error"] for trial in failed] == ["UserError: no fp16 today"]
    assert found.trials == 4
    assert len(found.plans) >= 1


def test_an_interrupted_trial_is_none(run, asked, monkeypatch):
    built = studies.plans.build

    def build(model, plan, *more):
        if any(choice.dtype == "fp16" for choice in plan.values()):
            raise KeyboardInterrupt
        return built(model, plan, *more)

    monkeypatch.setattr(studies.plans, "build", build)
    with pytest.raises(KeyboardInterrupt, match="the same command goes on"):
        search(run, QUICK, trials=3, device="cpu")
    monkeypatch.setattr(studies.plans, "build", built)
    found = search(run, QUICK, trials=3, device="cpu")
    assert found.trials == 3
    assert [trial.state.name for trial in trials_of(run).trials] == ["COMPLETE", "FAIL", "COMPLETE", "COMPLETE"]
    assert found.rows


def test_equal_plans_are_measured_once():
    class Trial:
        def __init__(self, number, plan):
            self.number, self.user_attrs, self.values = number, {"plan": plan}, (0.5, 1.0, 100)

    front = studies._front([Trial(3, {"fc1": 1}), Trial(1, {"fc1": 1}), Trial(2, {"fc1": 2})])
    assert [trial.number for trial in front] == [1, 2]


def test_other_terms_are_another_study(run, asked):
    search(run, QUICK, trials=1, device="cpu")
    with pytest.raises(UserError, match="another batch"):
        search(run, SearchConfig(batch=9, budget_s=0.001), trials=2, device="cpu")
    assert search(run, SearchConfig(batch=9, budget_s=0.001), trials=1, name="other", device="cpu").study == "other"


@pytest.mark.parametrize(
    ("terms", "named"),
    [
        ({"dtypes": ("int4",)}, "int4"),
        ({"dtypes": ()}, "dtype"),
        ({"least_density": 0.0}, "density"),
        ({"least_density": 0.5, "most_density": 0.1}, "density"),
        ({"batch": 0}, "batch"),
        ({"batch": 2**31}, "batch"),
        ({"budget_s": math.inf}, "budget"),
        ({"budget_s": math.nan}, "budget"),
        ({"finetune_epochs": -1}, "finetune"),
    ],
)
def test_terms_that_make_no_sense_are_refused(terms, named):
    with pytest.raises(UserError, match=named):
        SearchConfig(**terms)


def test_a_dtype_that_is_named_twice_counts_once():
    assert SearchConfig(dtypes=("int8", "fp16", "int8")).dtypes == ("int8", "fp16")


@pytest.mark.parametrize("made", ["other directions", "trials", "terms"])
def test_a_study_of_somebody_else_is_refused(run, tmp_path, made):
    url = f"sqlite:///{tmp_path / 'theirs.db'}"
    wanted = ["maximize", "minimize", "minimize"]
    theirs = optuna.create_study(storage=url, study_name="theirs", directions=wanted[:1] if "dir" in made else wanted)
    if made == "trials":
        theirs.optimize(lambda trial: (trial.suggest_float("x", 0, 1), 1, 1), n_trials=1)
    if made == "terms":
        theirs.set_user_attr("terms", 5)
    with pytest.raises(UserError, match=r"the study theirs in .* is not one of `qsparse search`"):
        search(run, QUICK, trials=2, storage=url, name="theirs", device="cpu")


@pytest.mark.parametrize(
    "url",
    [
        "sqlite://",
        "sqlite:///:memory:",
        "nonsense",
        "sqlite:////nowhere/at/all.db",
        "postgresql+psycopg2://localhost/x",
    ],
)
def test_a_storage_that_cannot_be_opened_is_named(run, url):
    with pytest.raises(UserError, match="storage"):
        search(run, QUICK, trials=1, storage=url, device="cpu")


@pytest.mark.parametrize("option", ["storage", "name"])
def test_an_empty_name_is_refused(run, option):
    with pytest.raises(UserError, match="is empty: name one, or leave it out"):
        search(run, QUICK, trials=1, device="cpu", **{option: ""})


def test_no_validation_split_no_search(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    train(TrainConfig(hidden=(), epochs=1, data="mnist-5k", device="cpu", validation=0))
    with pytest.raises(UserError, match="validation split"):
        search(None, QUICK, device="cpu")


def test_two_processes_on_one_file_share_the_work(run):
    trials = 14
    command = [
        *(sys.executable, "-m", "qsparse", "search", str(run), "--device", "cpu", "--trials", str(trials)),
        *("--batch", "8", "--budget", "0.05", "--storage", f"sqlite:///{run}/shared.db", "--json"),
    ]
    both = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) for _ in range(2)]
    said = [process.communicate(timeout=300) for process in both]
    assert [process.returncode for process in both] == [0, 0], said
    mine, other = (set(map(int, re.findall(r"^trial (\d+):", errors, re.MULTILINE))) for _, errors in said)
    assert len(mine) > 1, "one process did it all"
    assert len(other) > 1, "one process did it all"
    assert not mine & other
    assert trials <= len(mine | other) <= trials + 1  # both may begin the last one
    url = f"sqlite:///{run}/shared.db"
    assert len(optuna.load_study(study_name=None, storage=url).trials) == len(mine | other)
    found = [json.loads(output) for output, _ in said]
    assert any(one["rows"] for one in found), "nobody measured the Pareto set"


def test_two_studies_of_a_run_do_not_share_their_variants(run, asked):
    other = f"sqlite:///{run}/other.db"
    named = [{"name": "a study"}, {"name": "a/study"}, {"storage": other}, {"storage": other, "name": "a study"}, {}]
    found = [search(run, QUICK, trials=1, device="cpu", **options) for options in named]
    directories = [name for each in found for name in each.plans]
    assert len(set(directories)) == 5
    assert directories[-1] == "search-0"
    assert directories[0].startswith("search-a_study-")
    assert all(qsparse.load(run / name) for name in directories)


def test_the_command_prints_and_saves(run, monkeypatch, asked):
    result = CliRunner().invoke(cli.app, ["search", "--trials", "2", "--device", "cpu", "--batch", "8"])
    assert result.exit_code == 0, result.output
    assert "search-0: fc1 float32, fc2 float32" in result.stdout
    assert re.search(r"2 trials in sqlite:///runs.1.search\.db", result.stdout)
