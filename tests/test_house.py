"""The house rules: which file belongs to which, who may import whom, and what a public face must say."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

from qsparse import kernels

ROOT = Path(__file__).resolve().parents[1]
PACKAGE, CUDA, TESTS, EXPERIMENTS = (ROOT / name for name in ("qsparse", "cuda", "tests", "experiments"))
LONGEST = 600  # lines of one file

# What a room may import of qsparse besides itself; rooms that are not named here may import any.
MAY_IMPORT = {
    "kernels": set(),
    "oracles": set(),
    "nn": {"kernels"},
    "models": {"nn", "data"},
}


def sources_of(face: str) -> set[str]:
    return set(getattr(kernels, face).sources)


def python_files(room: str) -> list[Path]:
    return sorted((PACKAGE / room).rglob("*.py")) or [PACKAGE / f"{room}.py"]


def rooms_imported(text: str, package: tuple[str, ...]) -> set[str]:
    """The rooms of qsparse that a module of ``package`` imports, at its top or inside a function."""
    found = set()
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) + "." if node.level else ""
            names = [f"{base}{node.module or ''}.{alias.name}".replace("..", ".") for alias in node.names]
        else:
            continue
        parts = (name.split(".") for name in names)
        found |= {part[1] for part in parts if part[0] == "qsparse" and len(part) > 1}
    return found


@pytest.mark.parametrize("face", kernels.FACES)
def test_a_face_has_its_sources_its_oracle_and_its_test(face):
    assert (PACKAGE / "kernels" / f"{face}.py").is_file()
    assert (PACKAGE / "oracles" / f"{face}.py").is_file()
    assert (TESTS / "kernels" / f"test_{face}.py").is_file()
    assert sources_of(face)
    for name in sources_of(face):
        assert (CUDA / name).is_file()
        assert name.startswith(face)
        assert getattr(kernels, face).sources[name], f"{name} has no instances"


def test_faces_and_oracles_are_the_same_stems():
    def stems(room):
        return {path.stem for path in (PACKAGE / room).glob("*.py") if not path.stem.startswith("_")}

    assert stems("kernels") == stems("oracles") == set(kernels.FACES)


def test_every_source_belongs_to_exactly_one_face_or_experiment():
    owners: dict[str, list[str]] = {path.name: [] for path in CUDA.glob("*.cu")}
    for face in kernels.FACES:
        for name in sources_of(face):
            owners[name].append(face)
    for experiment in EXPERIMENTS.glob("*/"):
        text = "".join(path.read_text() for path in experiment.iterdir() if path.suffix in {".py", ".json", ".toml"})
        for name in owners:
            if not owners[name] and re.search(rf"\b{re.escape(name)}\b", text):
                owners[name].append(experiment.name)
    assert {name: who for name, who in owners.items() if len(who) != 1} == {}


def test_cuda_holds_sources_only():
    files = [path for path in CUDA.rglob("*") if path.is_file()]
    assert files
    assert [path for path in files if path.suffix not in {".cu", ".cuh"}] == []
    assert [path for path in files if path.suffix == ".cuh" and path.parent != CUDA / "common"] == []


def test_every_header_is_included():
    texts = {path.name: path.read_text() for path in CUDA.rglob("*.cu*")}
    for header in (CUDA / "common").glob("*.cuh"):
        users = [name for name, text in texts.items() if re.search(rf'#include "(common/)?{header.name}"', text)]
        assert users, f"{header.name} is included nowhere"


@pytest.mark.parametrize("room", MAY_IMPORT)
def test_rooms_import_what_lies_below_them(room):
    for path in python_files(room):
        package = path.relative_to(ROOT).parts[:-1]
        assert rooms_imported(path.read_text(), package) <= MAY_IMPORT[room] | {room}, path.name


def test_imports_are_seen():
    text = """
from qsparse import nn
def f():
    import qsparse.data
    from qsparse.train.fit import fit
    from .. import cli
    from . import gemm
    import torch, qsparse
"""
    assert rooms_imported(text, ("qsparse", "kernels")) == {"nn", "data", "train", "cli", "kernels"}


@pytest.mark.parametrize("face", kernels.FACES)
def test_a_face_documents_itself(face):
    text = getattr(kernels, face).__doc__
    sections = ["Parameters"] if "in place" in text.splitlines()[0] else ["Parameters", "Returns"]
    for section in sections:
        assert re.search(rf"^ *{section}\n *-+$", text, re.MULTILINE), f"no section {section}"
    assert re.search(r"\bRaises\b.*(TypeError|ValueError)", text, re.DOTALL)
    assert re.search(r"^ *Sources?: ", text, re.MULTILINE), "no source of the method"
    code = getattr(kernels, face).__wrapped__.__code__
    for name in code.co_varnames[: code.co_argcount + code.co_kwonlyargcount]:
        assert re.search(rf"\b{name}\b.* : |\b{name}\b, .* : ", text), f"{name} is not described"


def test_files_are_short():
    files = [path for place in (PACKAGE, CUDA, TESTS, EXPERIMENTS) for path in place.rglob("*.*")]
    lengths = {
        str(path.relative_to(ROOT)): len(path.read_text().splitlines())
        for path in files
        if path.suffix in {".py", ".cu", ".cuh"}
    }
    assert len(lengths) > 40
    assert {name: length for name, length in lengths.items() if length > LONGEST} == {}
