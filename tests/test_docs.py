"""The manual keeps its word: every block of every page runs, in the order of the page, and what it names is there."""

from __future__ import annotations

import functools
import json
import re
import shlex
import shutil
import subprocess
import sys
import tomllib
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer
from typer.testing import CliRunner

from qsparse import cli, kernels, measure, nn, variants
from qsparse.search import study
from qsparse.train.config import TrainConfig
from qsparse.train.run import train

ROOT = Path(__file__).parents[1]
PAGES = [*sorted((ROOT / "docs").rglob("*.md")), ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"]
TARGETS = set(re.findall(r"^(\w[\w-]*):", (ROOT / "Makefile").read_text(), re.MULTILINE))
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
LONGEST = 60  # lines of a how-to


@dataclass(frozen=True)
class Block:
    language: str
    title: str | None
    text: str


def blocks(page: Path) -> list[Block]:
    found = re.findall(r'^```(\w*)(?: title="([^"]+)")?\n(.*?)^```$', page.read_text(), re.MULTILINE | re.DOTALL)
    return [Block(language, title or None, text) for language, title, text in found]


def spans(page: Path) -> list[str]:
    prose = re.sub(r"^```.*?^```$", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    return [" ".join(text.split()) for text in re.findall(r"`([^`]+)`", prose)]


@pytest.fixture(scope="module")
def trained(tmp_path_factory) -> Path:
    """A directory with runs/1 and its int8 variant."""
    directory = tmp_path_factory.mktemp("trained")
    train(TrainConfig(data="mnist-5k", device="cpu", epochs=1), out=directory / "runs" / "1")
    measuring = {"batches": (1,), "budget_s": 0.001}
    variants.quantize_run(directory / "runs" / "1", "int8", device="cpu", measuring=measuring)
    return directory


@pytest.fixture
def hurried(monkeypatch, tmp_path):
    """Measurements take no time, and the current directory is empty."""
    monkeypatch.chdir(tmp_path)
    quick = functools.partial(measure.measure, batches=(1, 64), budget_s=0.001)

    def hurry(*arguments, budget_s=None, **options):
        return quick(*arguments, **options)

    for module in (measure, variants, study):
        monkeypatch.setattr(module, "measure", hurry)


def run_line(line: str) -> None:
    """Run a command of qsparse; of another tool, check what it names."""
    words = shlex.split(line, comments=True)
    if not words:
        return
    if words[0] == "qsparse":
        result = CliRunner().invoke(cli.app, words[1:])
        assert result.exit_code == 0, f"{line}: {result.output}{result.exception!r}"
    elif words[0] == "make":
        assert set(words[1:]) <= TARGETS, line
    elif words[:3] == ["pip", "install", "."] or words[:2] == ["pip", "install"]:
        extras = re.fullmatch(r"\.(?:\[(\w+)\])?", words[2])
        assert extras, line
        assert extras[1] is None or extras[1] in EXTRAS, line
    elif words[0] == ".venv/bin/python":
        assert (ROOT / words[3]).is_file(), line
    else:
        assert words == [".", ".venv/bin/activate"], f"no test knows how to run {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
@pytest.mark.usefixtures("hurried")
def test_every_block_runs(page, trained):
    if "qsparse train" not in page.read_text():
        shutil.copytree(trained / "runs", "runs")
    for block in blocks(page):
        if block.title and block.language != "sh":
            Path(block.title).write_text(block.text)
        if block.language == "python":
            exec(compile(block.text, block.title or page.name, "exec"), {"__name__": "__main__"})
        elif block.language == "sh":
            for line in block.text.splitlines():
                run_line(line)
        elif block.language == "toml":
            tomllib.loads(block.text)
        elif block.language == "json":
            json.loads(block.text)
        else:
            assert block.language == "text", f"no test knows how to run a block of {block.language!r}"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_the_prose_names_commands_and_options_that_are_there(page):
    for text in spans(page):
        if not text.startswith("qsparse "):
            continue
        command, words = typer.main.get_command(cli.app), shlex.split(text)[1:]
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        assert words or not hasattr(command, "commands") or text == "qsparse bench", text
        options = {option for one in command.params for option in (*one.opts, *one.secondary_opts)}
        assert {word for word in words if word.startswith("--")} <= options, text


@pytest.mark.parametrize("page", sorted(ROOT.glob("experiments/*/README.md")), ids=lambda page: page.parent.name)
def test_what_an_experiment_says_to_run_is_there(page):
    """These take long: their commands are parsed, not run."""
    text = page.read_text().replace("\\\n", " ")
    fenced = "".join(re.findall(r"^```sh\n(.*?)^```$", text, re.MULTILINE | re.DOTALL))
    lines = re.findall(r"^ {4}(\S.*)$", text, re.MULTILINE) + fenced.splitlines()
    lines += [span for span in spans(page) if span.startswith(("python ", "qsparse "))]
    assert lines
    for line in lines:
        program, *words = shlex.split(line, comments=True)
        if program == "python":
            assert (ROOT / words[0]).is_file(), line
            continue
        assert program == "qsparse", line
        command = typer.main.get_command(cli.app)
        while words and words[0] in getattr(command, "commands", ()):
            command = command.commands[words.pop(0)]
        command.make_context(line, words)


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_a_place_of_the_checkout_that_is_named_is_there(page):
    places = [text for text in spans(page) if re.match(r"(cuda|docs|experiments|qsparse|tests)/", text)]
    example = "scale_rows"  # the operation by which CONTRIBUTING.md shows which files belong to one
    assert [place for place in places if example not in place and not (ROOT / place).exists()] == []
    assert page.name != "CONTRIBUTING.md" or len(places) > 10


@pytest.mark.parametrize("page", ["quantizer", "kernel"])
def test_a_how_to_is_short(page):
    (code,) = (one.text for one in blocks(ROOT / "docs" / "how-to" / f"{page}.md") if one.language == "python")
    assert len(code.splitlines()) < LONGEST


def test_every_page_is_in_the_navigation():
    navigation = (ROOT / "mkdocs.yml").read_text()
    pages = [str(page.relative_to(ROOT / "docs")) for page in (ROOT / "docs").rglob("*.md")]
    assert len(pages) > 10
    assert [page for page in pages if f": {page}\n" not in navigation] == []


def test_the_manual_builds(tmp_path, monkeypatch):
    """As `make test` builds it, but in this process: strictly, so that a link to nowhere is an error."""
    pytest.importorskip("mkdocs", reason="MkDocs is not installed: pip install '.[docs]'")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    front = (tmp_path / "index.html").read_text()  # the README, whose links lead to pages of the manual
    for link in ("how-to/quantize.html", "experiments/08_pareto/index.html", "contributing.html#where-things-are"):
        assert f'href="{link}"' in front
    assert "qsparse sweep" in (tmp_path / "reference" / "commands.html").read_text()
    for page, names in (("kernels", kernels.FACES), ("nn", [name for name in nn.__all__ if name[0].isupper()])):
        text = (tmp_path / "reference" / f"{page}.html").read_text()
        assert [name for name in names if not re.search(rf'id="qsparse\.{page}\.\w+\.{name}"', text)] == []
    assert (tmp_path / "experiments" / "10_gemm_bench" / "figure.png").is_file()
