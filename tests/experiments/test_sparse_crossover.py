"""The tables of the sparse products' experiment are those of its rows, and say what the rows say."""

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "experiments" / "02_sparse_crossover"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("sparse_crossover_draw", HERE / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_rows(draw):
    written = (HERE / "README.md").read_text().split(draw.BEGIN)[1].split(draw.END)[0].strip()
    if not draw.ROWS.exists():
        assert written == draw.NOT_YET
        return
    assert written == draw.tables([json.loads(line) for line in draw.ROWS.read_text().splitlines()])
    assert draw.FIGURE.exists()


def row(density, us, peer, peer_us, plan="kept"):
    ratio = us and peer_us / us
    cell = {"op": "spmm_csr", "dtype": "float32", "shape": [64, 32, 16], "density": density, "plan": plan}
    where = {"gpu": "Some GPU", "torch": "2", "cuda": "13", "commit": "abc"}
    return cell | {"us": us, "peer": peer, "peer_us": peer_us, "ratio": ratio} | where


def test_tables_and_figure_of_some_rows(draw, tmp_path, monkeypatch):
    rows = [
        row(d, 1000 * d, peer, us) for d in (0.02, 0.1, 0.3) for peer, us in (("cublas", 70), ("torch_csr", 3000 * d))
    ]
    rows += [row(d, 50, "cublas", 70, "kept, highest") for d in (0.02, 0.1, 0.3)]
    text = draw.tables(rows)
    assert "| 64, 32, 16 | float32 | 0.07 | 0.023 |" in text
    assert "| spmm_csr | float32 | kept | torch_csr | 3 | 3.00x | 3.00x | 64, 32, 16, 0.02 |" in text
    assert "| 64, 32, 16 | 0.1 | 100.0 | 3.00x | 0.70x |" in text
    assert text.endswith("Some GPU, PyTorch 2, CUDA 13, commit abc")
    assert dict(draw._points(rows, "qsparse"))[0.1] == 100
    assert dict(draw._points(rows, "qsparse, highest"))[0.1] == 50
    monkeypatch.setattr(draw, "FIGURE", tmp_path / "figure.png")
    draw.draw(rows)
    assert draw.FIGURE.stat().st_size > 1000


def test_a_wrong_kernel_has_no_time(draw):
    text = draw.tables([row(0.1, None, "cublas", 70)])
    assert "| spmm_csr | float32 | kept | cublas | 1 | wrong | | |" in text
    assert "| 64, 32, 16 | 0.1 | wrong |  |  |" in text
