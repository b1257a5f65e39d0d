"""README.md keeps its word: its Python runs, its commands parse, and what it names is there."""

from __future__ import annotations

import re
import shlex
import tomllib
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qsparse import cli, measure, variants

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "README.md").read_text()
BLOCKS = re.findall(r"^```(\w+)\n(.*?)^```$", TEXT, re.MULTILINE | re.DOTALL)
PYTHON = [code for language, code in BLOCKS if language == "python"]
SPANS = re.findall(r"`([^`\n]+)`", re.sub(r"^```.*?^```$", "", TEXT, flags=re.MULTILINE | re.DOTALL))
SHELL = SPANS + [line for language, code in BLOCKS if language != "python" for line in code.splitlines()]
COMMANDS = [line for line in (text.strip().removeprefix("$ ") for text in SHELL) if line.startswith("qsparse ")]
LINKS = [target for target in re.findall(r"\]\(([^)#]+)", TEXT) if "://" not in target]
# Places of the checkout; what a command makes, what the user has, and the layout of data are none.
PLACES = [text for text in SPANS if re.fullmatch(r"\w[\w./-]*/[\w./-]*", text) and not re.match(r"runs/|DIR/", text)]


def in_pytest(code: str):
    """A block as a parameter; one that says so needs a GPU."""
    return pytest.param(code, marks=pytest.mark.gpu if "needs a GPU" in code else ())


@pytest.mark.parametrize("code", [in_pytest(code) for code in PYTHON])
def test_python_runs(code):
    exec(compile(code, "README.md", "exec"), {})


@pytest.mark.parametrize("line", list(dict.fromkeys(COMMANDS)))
def test_a_command_parses(line):
    command, arguments = typer.main.get_command(cli.app), shlex.split(line)[1:]
    while arguments and arguments[0] in getattr(command, "commands", ()):
        command = command.commands[arguments.pop(0)]
    assert not hasattr(command, "commands"), f"{line} names no command"
    command.make_context(line, arguments)


SWEEP = """
train = {hidden = 8, epochs = 1, data = "mnist-5k"}
quantize = {dtype = "int8"}
measure = {batches = [1], budget_s = 0.001}
"""
# Long for a test, and run by their own: see tests/bench and tests/test_cli.py.
ELSEWHERE = ("qsparse bench", "qsparse demo", "qsparse ladder")


def test_the_commands_run_one_after_the_other(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Path("sweep.toml").write_text(SWEEP)

    def hurried(*arguments, budget_s=None, **options):
        return measured(*arguments, **{**options, "batches": (1, 1024), "budget_s": 0.001})

    measured = measure.measure
    study = pytest.importorskip("qsparse.search.study", reason="Optuna is not here", exc_type=ModuleNotFoundError)
    for module in (measure, variants, study):
        monkeypatch.setattr(module, "measure", hurried)
    lines = [line for line in dict.fromkeys(COMMANDS) if not line.startswith(ELSEWHERE)]
    assert len(lines) > 8
    for line in lines:
        result = CliRunner().invoke(cli.app, shlex.split(line)[1:])
        assert result.exit_code == 0, f"{line}: {result.output} {result.exception!r}"


def test_every_command_is_shown():
    assert {line.split()[1] for line in COMMANDS} == set(typer.main.get_command(cli.app).commands)


@pytest.mark.parametrize("place", [*PLACES, *LINKS])
def test_a_place_exists(place):
    assert (ROOT / place).exists()


def test_make_targets_and_extras_exist():
    targets = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
    assert {"demo", "test"} <= set(re.findall(r"`make ([\w-]+)`", TEXT)) <= targets
    assert {"cuda"} <= set(re.findall(r"pip install '\.\[(\w+)\]'", TEXT)) <= extras.keys()


def test_something_is_tested():
    assert PYTHON
    assert PLACES
    assert len(LINKS) > 10
