"""The manual keeps its word: every block of every page runs, in the order of the page, and what it names is there."""

from __future__ import annotations

import functools
import importlib
import inspect
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

import qsparse
from qsparse import cli, kernels, measure, nn, quant, sparse, variants
from qsparse.bench import harness
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


REFERENCE = ROOT / "docs" / "reference"
PUBLIC = {
    "kernels": kernels.FACES,
    "nn": nn.__all__,
    "quant": quant.__all__,
    "sparse": sparse.__all__,
    "models": [name for name in qsparse.__all__ if name != "__version__"],
}


def described(page: str) -> list[str]:
    """The objects that a page of the reference has the docstrings of, by their paths."""
    return re.findall(r"^::: (\S+)$", (REFERENCE / f"{page}.md").read_text(), re.MULTILINE)


@pytest.mark.parametrize("page", PUBLIC)
def test_the_reference_has_all_that_is_public(page):
    """Functions and classes by their docstrings, names of choices in its tables."""
    objects = {path.rpartition(".")[2] for path in described(page)}
    text = (REFERENCE / f"{page}.md").read_text()
    for name in PUBLIC[page]:
        thing = getattr(importlib.import_module("qsparse" if page == "models" else f"qsparse.{page}"), name)
        if callable(thing):
            assert name in objects, name
        else:
            assert [each for each in (name, *thing) if f"`{each}`" not in text] == []


@pytest.mark.parametrize("page", [path.stem for path in sorted(REFERENCE.glob("*.md"))])
def test_what_the_reference_names_is_there_and_documented(page):
    """Each where it says, with a docstring, under the name by which it is imported."""
    text = (REFERENCE / f"{page}.md").read_text()
    headings = dict(re.findall(r"^::: (\S+)\n {4}options: \{heading: ([\w.]+)", text, re.MULTILINE))
    assert set(headings) == set(described(page))
    for path, heading in headings.items():
        module, _, name = path.rpartition(".")
        thing = getattr(importlib.import_module(module), name)
        assert inspect.getdoc(thing), path
        place, _, name = f"qsparse.{heading.removeprefix('qsparse.')}".rpartition(".")
        if place == "qsparse.kernels.spmm_csr":  # a function there, and a module
            assert getattr(kernels.spmm_csr, name) is thing
        else:
            assert getattr(importlib.import_module(place), name) is thing


LAYERS = [name for name in nn.__all__ if name[0].isupper()]


@pytest.mark.parametrize(("page", "names"), [("kernels", kernels.FACES), ("nn", LAYERS)], ids=["kernels", "nn"])
def test_the_reference_begins_with_a_table_of_all(page, names):
    table = re.findall(r"^\| `(\w+)` \|", (REFERENCE / f"{page}.md").read_text(), re.MULTILINE)
    assert sorted(table) == sorted(names)


def test_the_reference_names_every_command():
    found = re.findall(r"^\| `qsparse ([\w ]+)` \|", (REFERENCE / "commands.md").read_text(), re.MULTILINE)

    def leaves(command, path=()) -> list[str]:
        inner = getattr(command, "commands", None)
        return [" ".join(path)] if inner is None else [leaf for n, c in inner.items() for leaf in leaves(c, (*path, n))]

    assert sorted(found) == sorted(leaves(typer.main.get_command(cli.app)))


def test_the_reference_has_every_field_of_a_row(trained, tmp_path, monkeypatch):
    """What measures today writes no field that the page lacks, and the page has none that nothing writes."""
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)
    bench, ladder = tmp_path / "bench.jsonl", tmp_path / "ladder.jsonl"
    run, small = str(shutil.copytree(trained / "runs" / "1", tmp_path / "1")), ("--device", "cpu", "--out", str(bench))
    shapes, training = ("--shapes", "8,8,8"), ("--data", "mnist-5k", "--hidden", "4", "--epochs", "1", "--rounds", "1")
    for line in (
        ("bench", "gemm", "--dtype", "float32", *shapes, *small),
        ("bench", "int8", *shapes, *small),
        ("bench", "spmm", "--density", "0.5", *shapes, *small),
        ("bench", "mlp", "--network", "12,5,3", "--batch", "3", *small),
        ("ladder", *training, "--device", "cpu", "--out", str(ladder)),
    ):
        assert CliRunner().invoke(cli.app, line).exit_code == 0, line
    measuring = {"batches": (1,), "budget_s": 0.001}
    variants.sparsify_run(run, 0.1, "auto", finetune_epochs=1, device="cpu", measuring=measuring)
    variants.sparsify_run(run, 0.1, dtype="int8", device="cpu", measuring=measuring)
    page = (REFERENCE / "rows.md").read_text()
    parts = dict(zip(("Models", "Kernels", "Training"), re.split(r"^## ", page, flags=re.MULTILINE)[1:], strict=True))
    places = {"Models": Path(run) / "rows.jsonl", "Kernels": bench, "Training": ladder}
    for part, place in places.items():
        written = set().union(*(json.loads(line) for line in place.read_text().splitlines()))
        named = set(re.findall(r"`(\w+)`", parts[part]))
        assert written - named == set(), part
        listed = {name for row in re.findall(r"^\| (`.*?`) \|", parts[part], re.M) for name in re.findall(r"\w+", row)}
        assert listed - written == set(), part


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
    for page, names in (("kernels", kernels.FACES), ("nn", LAYERS)):
        text = (tmp_path / "reference" / f"{page}.html").read_text()
        assert [name for name in names if not re.search(rf'id="qsparse\.{page}\.\w+\.{name}"', text)] == []
    assert (tmp_path / "experiments" / "10_gemm_bench" / "figure.png").is_file()
