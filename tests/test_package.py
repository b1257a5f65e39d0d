"""The package as it is installed: what the wheel carries, and how soon the command answers."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
import tomllib
import zipfile
from pathlib import Path

import pytest

import qsparse

ROOT = Path(__file__).parents[1]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
HEAVY = ("torch", "torchvision", "cupy", "scipy", "matplotlib", "numpy", "mlxtend", "optuna", "plotly")


def run(*command: str | Path, **options) -> subprocess.CompletedProcess[str]:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, timeout=120, **options)


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built with the backend that is installed, so without a network."""
    folder = tmp_path_factory.mktemp("wheel")
    built = run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps", "--no-build-isolation"),
        *("--no-index", "--wheel-dir", folder, ROOT),
        cwd=folder,
    )
    assert built.returncode == 0, built.stdout + built.stderr
    (path,) = folder.glob("qsparse-*.whl")
    return path


@pytest.fixture(scope="module")
def installed(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A virtual environment with the wheel in it, and the packages of this one below it; its bin directory."""
    place = tmp_path_factory.mktemp("installed") / "venv"
    made = run(sys.executable, "-m", "venv", "--without-pip", place)
    assert made.returncode == 0, made.stderr
    python = place / "bin" / "python"
    site = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").stdout.strip())
    below = [entry for entry in sys.path if Path(entry).name in ("site-packages", "dist-packages")]
    (site / "below.pth").write_text("".join(f"{entry}\n" for entry in below))
    added = run(
        *(sys.executable, "-m", "pip", "--disable-pip-version-check", "--python", python, "install", "--no-deps"),
        *("--no-index", "--force-reinstall", "--no-warn-script-location", wheel),
    )
    assert added.returncode == 0, added.stdout + added.stderr
    return place / "bin"


@pytest.fixture
def clean_environment() -> dict[str, str]:
    """This environment without what would show the checkout to a subprocess."""
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "PYTHONHOME")}


def test_the_versions_agree():
    assert PROJECT["project"]["version"] == qsparse.__version__


def test_the_wheel_carries_the_kernels_and_no_other_top_level_name(wheel):
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
    sources = {path.relative_to(ROOT / "cuda").as_posix() for path in (ROOT / "cuda").rglob("*") if path.is_file()}
    assert any(name.endswith(".cu") for name in sources)
    assert any(name.startswith("common/") for name in sources)
    carried = {name.removeprefix("qsparse/_cuda/") for name in names if name.startswith("qsparse/_cuda/")}
    assert carried == sources
    modules = {path.relative_to(ROOT).as_posix() for path in (ROOT / "qsparse").rglob("*.py")}
    assert modules <= names
    assert {name.split("/")[0] for name in names} == {"qsparse", f"qsparse-{qsparse.__version__}.dist-info"}
    assert any(name.endswith("LICENSE") for name in names)


def test_the_installed_wheel_finds_its_kernels(installed, clean_environment, tmp_path):
    found = run(
        *(installed / "python", "-c"),
        "import qsparse; from qsparse.kernels import _load; print(qsparse.__file__); print(_load.source_dir())",
        cwd=tmp_path,
        env=clean_environment,
    )
    assert found.returncode == 0, found.stderr
    package, sources = map(Path, found.stdout.split())
    assert package.is_relative_to(installed.parent)
    assert sources == package.parent / "_cuda"
    assert sorted(path.name for path in sources.glob("*.cu")) == sorted(p.name for p in (ROOT / "cuda").glob("*.cu"))


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["--help"], 0, "quantize"),
        (["quantize", "--help"], 0, "--dtype"),
        (["train", "--no-such-option"], 2, "--no-such-option"),
        (["no-such-command"], 2, "no-such-command"),
    ],
)
def test_help_and_usage_errors_answer_at_once(installed, clean_environment, tmp_path, arguments, code, words):
    seconds = []
    for _ in range(6):
        began = time.perf_counter()
        answer = run(installed / "qsparse", *arguments, cwd=tmp_path, env=clean_environment)
        seconds.append(time.perf_counter() - began)
        if seconds[-1] < 0.5:
            break
    assert answer.returncode == code
    assert words in (answer.stderr if code else answer.stdout)
    assert "Traceback" not in answer.stderr
    # The requirement on the answer, not a benchmark: the best of a few tries, since the machine may be busy.
    assert min(seconds) < 0.5
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("code", "arguments"),
    [
        ("import qsparse", []),
        ("import qsparse.errors", []),
        ("import qsparse.cli", []),
        ("from qsparse.cli import main; main()", ["--help"]),
        ("from qsparse.cli import main; main()", ["quantize", "--help"]),
        ("from qsparse.cli import main; main()", ["train", "--epochs", "many"]),
    ],
)
def test_heavy_packages_wait_for_the_command_that_needs_them(code, arguments):
    listing = f"import atexit, sys\natexit.register(lambda: print([n for n in {HEAVY} if n in sys.modules]))\n{code}"
    answer = run(sys.executable, "-c", listing, *arguments, env=os.environ | {"PYTHONPATH": str(ROOT)})
    assert "Traceback" not in answer.stderr
    assert answer.stdout.splitlines()[-1] == "[]"


@pytest.mark.parametrize(
    ("arguments", "installed"),
    [("install", "."), ("demo CUDA=cuda", "'.[cuda]'"), ("test CUDA=cuda12", "'.[test,docs,cuda12]'"),
     ("gpu-test", "'.[test,cuda]'"), ("gpu-test CUDA=cuda12", "'.[test,cuda12]'")],
)  # fmt: skip
def test_make_brings_cupy_where_it_is_asked_to(tmp_path, arguments, installed):
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    environment = {name: value for name, value in os.environ.items() if "MAKEFLAGS" not in name}  # of a `make test`
    asked = ("make", "--dry-run", f"VENV={tmp_path / 'venv'}", *arguments.split())
    commands = run(*asked, cwd=ROOT, env=environment).stdout.splitlines()
    assert [line.partition("--editable ")[2] for line in commands if "pip install" in line] == [installed]


def test_make_refuses_another_cuda():
    if not shutil.which("make"):
        pytest.skip("make is not installed")
    assert "CUDA is cuda or cuda12, not 13" in run("make", "--dry-run", "CUDA=13", cwd=ROOT).stderr
