"""The ladder of experiments/01_gemm_ladder: every rung compiles, is named, and (on a GPU) computes the product."""

import importlib.util
import re
import sys
from pathlib import Path

import pytest
import torch

from qsparse.bench import harness
from qsparse.bench.gemm import problem
from qsparse.kernels import _load

LADDER = Path(__file__).resolve().parents[2] / "experiments" / "01_gemm_ladder"


@pytest.fixture(scope="module")
def ladder():
    spec = importlib.util.spec_from_file_location("gemm_ladder_run", LADDER / "run.py")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # dataclasses look their module up
    spec.loader.exec_module(module)
    yield module
    del sys.modules[spec.name]


SOURCES = sorted(LADDER.glob("*.cu"))


def test_every_file_is_one_rung_in_its_order(ladder):
    assert [rung.source for rung in ladder.RUNGS] == SOURCES
    assert [int(rung.stem[:2]) for rung in ladder.RUNGS] == list(range(1, len(SOURCES) + 1))


@pytest.mark.parametrize("source", SOURCES, ids=lambda source: source.stem)
def test_a_rung_is_short_and_says_its_idea_first(source):
    lines = source.read_text().splitlines()
    assert lines[0].startswith("// y = x · wᵀ, ")
    assert len(lines) < 200
    if source != SOURCES[0]:
        assert any(line.startswith("// The new idea: ") for line in lines[:8])


@pytest.mark.parametrize("number", range(1, len(SOURCES) + 1))
def test_a_rung_compiles_without_spills_and_fits_the_card(ladder, number):
    pytest.importorskip("cuda.bindings.nvrtc", exc_type=ImportError)
    if not _load.include_dirs():
        pytest.skip("CUDA's headers are not installed")
    rung = ladder.RUNGS[number - 1]
    for arch in {"simt": ("sm_75", "sm_90a"), "sm80": ("sm_80", "sm_90a"), "sm90": ("sm_90a",)}[rung.tier]:
        cubin = _load.compile_source(str(rung.source), (rung.kernel,), arch, verbose=True)
        assert re.findall(r"(\d+) bytes spill stores, (\d+) bytes spill loads", cubin.log) == [("0", "0")], cubin.log
        (registers,) = re.findall(r"Used (\d+) registers", cubin.log)
        assert int(registers) * rung.threads <= 65536
        static = re.findall(r"(\d+) bytes smem", cubin.log)
        assert int((static or ["0"])[0]) + rung.shared <= (227 if rung.tier == "sm90" else 99) * 1024
        assert "serialized" not in cubin.log  # wgmma whose registers the compiler could not keep apart


def test_the_readme_shows_the_rows_that_there_are(ladder):
    assert ladder.table(ladder.read_rows()) in ladder.README.read_text()


def make_rows(ladder, wrong=()):
    names = [*((rung.stem, rung.dtype) for rung in ladder.RUNGS), (ladder.SUMMIT, "float16")]
    rows = []
    for size in ladder.SIZES:
        for step, (name, dtype) in enumerate(names):
            us = None if name in wrong else 1000.0 * 2**-step
            rows.append(
                {"rung": name, "dtype": dtype, "shape": [size] * 3, "us": us, "tflops": us and 2.0**step}
                | {"ratio": us and 0.5, "correct": us is not None, "gpu": "Some GPU", "torch": "2", "cuda": "13"}
                | {"date": "2026-01-02T03:04:05+00:00"}
            )
    return rows


def test_what_a_rung_gained_comes_from_the_rows(ladder):
    lines = [line for line in ladder.table(make_rows(ladder)).splitlines() if line.startswith("| [0")]
    assert len(lines) == len(ladder.RUNGS)
    assert [line.split(" | ")[5] for line in lines] == ["-"] + ["2.00x"] * (len(lines) - 1)
    assert all(line.endswith("| 50 % |") for line in lines)
    text = ladder.table(make_rows(ladder, wrong=("03_shared_tiles",)))
    gained = [line.split(" | ")[5] for line in text.splitlines() if line.startswith("| [0")]
    assert gained[1:5] == ["2.00x", "-", "-", "2.00x"]
    assert "Some GPU, PyTorch 2, CUDA 13, 2026-01-02" in text


def test_publishing_twice_leaves_one_table_and_a_figure(ladder, tmp_path, monkeypatch):
    readme = tmp_path / "README.md"
    readme.write_text(f"before\n{ladder.BEGIN}\nold\n{ladder.END}\nafter\n")
    monkeypatch.setattr(ladder, "README", readme)
    monkeypatch.setattr(ladder, "FIGURE", tmp_path / "figure.png")
    for _ in range(2):
        ladder.publish(make_rows(ladder, wrong=("02_coalesced",)))
    text = readme.read_text()
    assert text.startswith("before\n")
    assert text.endswith("after\n")
    assert text.count("| rung |") == 1
    assert "old" not in text
    assert (tmp_path / "figure.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.gpu
@pytest.mark.parametrize("number", range(1, len(SOURCES) + 1))
@pytest.mark.parametrize("tiles", [(1, 1, 1), (3, 2, 7)])
def test_a_rung_computes_the_product(ladder, number, tiles):
    device = torch.device("cuda", torch.cuda.current_device())
    rung = ladder.RUNGS[number - 1]
    if not ladder._runs_on(rung, device):
        pytest.skip(f"{rung.stem} needs another card")
    m, n, k = (count * size for count, size in zip(tiles, rung.tile, strict=True))
    given = problem((m, n, k), rung.dtype, "nt", device)
    error = harness.product_reference(given.a, given.b).error(rung(given.a, given.b))
    assert error.within(harness.TOLERANCES[rung.dtype])
