"""Each script of the experiments says what it does when asked, and does nothing else."""

from __future__ import annotations

import runpy
import sys
from pathlib import Path

import pytest

EXPERIMENTS = Path(__file__).parents[2] / "experiments"
SCRIPTS = [path for path in sorted(EXPERIMENTS.glob("*/*.py")) if "__main__" in path.read_text()]


def contents(folder: Path) -> dict[Path, bytes]:
    return {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: f"{path.parent.name}/{path.stem}")
@pytest.mark.parametrize(("option", "status"), [("--help", 0), ("--no-such-option", 2)])
def test_answers_and_leaves_its_files_alone(script, option, status, monkeypatch, capsys):
    assert_answers(script, option, status, monkeypatch, capsys)


@pytest.mark.parametrize("script", ["run", "wanda"])
@pytest.mark.parametrize("seeds", ["0", "-1", "x"])
def test_no_seeds_are_refused(script, seeds, monkeypatch, capsys):
    assert_answers(EXPERIMENTS / "06_sparsity" / f"{script}.py", seeds, 2, monkeypatch, capsys)


def assert_answers(script, option, status, monkeypatch, capsys):
    monkeypatch.setattr(sys, "argv", [str(script), option])
    monkeypatch.syspath_prepend(str(script.parent))
    monkeypatch.delitem(sys.modules, "run", raising=False)  # that of another experiment
    before = contents(script.parent)
    with pytest.raises(SystemExit) as exit_:
        runpy.run_path(str(script), run_name="__main__")
    sys.modules.pop("run", None)
    out = capsys.readouterr()
    assert exit_.value.code == status
    assert (out.out if status == 0 else out.err).startswith("usage: ")
    assert contents(script.parent) == before


def test_finds_the_scripts():
    assert {path.parent.name[:2] for path in SCRIPTS} >= {f"{number:02}" for number in range(11)}
