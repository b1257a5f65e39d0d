"""The tables of the int8 experiment are those of its rows, and say what the rows say."""

import importlib.util
import json
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parents[2] / "experiments" / "09_int8"


@pytest.fixture(scope="module")
def draw():
    spec = importlib.util.spec_from_file_location("int8_draw", HERE / "draw.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_tables_are_those_of_the_rows(draw):
    text = (HERE / "README.md").read_text()
    written = text.split(draw.BEGIN)[1].split(draw.END)[0].strip()
    if not draw.ROWS.exists():
        assert written == "Not measured yet: rows.jsonl is missing."
        return
    rows = [json.loads(line) for line in draw.ROWS.read_text().splitlines()]
    assert written == draw.tables(rows)
    assert draw.FIGURE.exists()
    assert all(row["timer"] == "cuda_graph" for row in rows)


def product(shape, peer, ratio, activations=None, **fields):
    us = None if ratio is None else 10.0
    row = {"op": "gemm_int8", "dtype": "int8", "out_dtype": "float16", "activations": activations}
    row |= {
        "shape": list(shape),
        "peer": peer,
        "us": us,
        "peer_us": 10 * (ratio or 1),
        "ratio": ratio,
        "tflops": 1300.0,
    }
    return (
        row
        | {
            "gpu": "Some GPU",
            "torch": "2",
            "cuda": "13",
            "date": "2026-11-30T00:00:00",
            "compile": "default",
            "commit": None,
        }
        | fields
    )


def line(text, start):
    return next(each for each in text.splitlines() if each.startswith(f"| {start}"))


def test_targets_stand_beside_what_was_measured(draw):
    rows = [
        product((4096, 4096, 4096), "torch._int_mm", 9.0),  # an older run of the same
        product((4096, 4096, 4096), "torch._int_mm", 2.0),
        product((64, 4096, 4096), "torch._int_mm", 0.5),
        product((512, 512, 512), "torch._int_mm", 0.125),  # no layer of the targets
        product((4096, 4096, 4096), "torch_int8_compiled", 1.75),
        product((4096, 4096, 4096), "cublas_fp32", 21.0),
        product((4096, 4096, 4096), "torch_eager_fp16", 1.5, "dynamic"),
        product((64, 4096, 4096), "torch_eager_fp16", 0.5, "dynamic"),  # too few rows
        product((2048, 2048, 2048), "torch_eager_fp16", 6.0, "dynamic"),
    ]
    text = draw.tables(rows)
    assert line(text, "fused int8 by bare").endswith("| 1.5x | 1.00x |")
    assert line(text, "the same, worst").endswith("| 1.0x | 0.50x |")
    assert line(text, "the same, geometric mean of all shapes below").endswith("|  | 0.50x |")
    assert line(text, "fused int8 by the compiled").endswith("| 1.8x | 1.75x |")
    assert line(text, "fused int8 at 4096³").endswith("| 1,250 | 1,300 |")
    assert line(text, "fused int8 at 8192³").endswith("| 1,250 | - |")
    assert line(text, "int8 with quantization").endswith("| 1.5x | 1.50x |")
    assert line(text, "the same, geometric mean of all shapes from").endswith("|  | 3.00x |")
    assert line(text, "fused int8 by fp32").endswith("| 20x | 21.00x |")
    assert "9.00x" not in text


def test_what_was_wrong_has_no_mean(draw):
    rows = [product((64, 4096, 4096), "torch._int_mm", None), product((4096,) * 3, "torch._int_mm", 2.0)]
    assert line(draw.tables(rows), "fused int8 by bare").endswith("| 1.5x | - |")


def test_cells_show_the_fastest_peer(draw):
    common = {"op": "mlp", "dtype": "int8", "sizes": [784, 4096, 4096, 10], "batch": 10_000}
    rows = [
        product((10_000, 10, 784), peer, us / 400, activations, **common | {"us": 400.0, "peer_us": us})
        for activations in ("dynamic", "static")
        for peer, us in (("torch_fp16_graph", 680.0), ("torchao", 640.0))
    ]
    text = draw.tables(rows)
    assert text.endswith("2026-11-30. Compiled peers: `torch.compile` with mode 'default'.")
    assert line(text, "784-4096-4096-10 | 10,000").endswith("| 400 (1.60x) | 400 (1.60x) | torchao | 640 |")
    assert line(text, "784-4096-4096-10 at 10,000, int8 static").endswith("| 1.7x | 1.60x |")
    assert line(text, "the worst cell").endswith("| 1.0x | 1.60x |")


def test_the_figure_is_drawn(draw, tmp_path, monkeypatch):
    monkeypatch.setattr(draw, "FIGURE", tmp_path / "figure.png")
    draw.draw([product((64, 64, 64), "torch._int_mm", 2.0)])
    assert draw.FIGURE.read_bytes().startswith(b"\x89PNG")
