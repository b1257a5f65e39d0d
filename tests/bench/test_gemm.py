import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli, kernels
from qsparse.bench import gemm, harness, summary, tables
from qsparse.bench.command import WRONG
from qsparse.errors import UserError

ROOT = Path(__file__).resolve().parents[2]
CPU = torch.device("cpu")
FIELDS = {
    *("op", "tier", "dtype", "shape", "density", "us", "us_p10", "us_p90", "peer", "peer_us", "ratio", "error"),
    *("gpu", "torch", "cuda", "date", "commit", "tflops", "percent_of_ceiling", "gbps", "epilogue", "precision"),
    *("sm_clock_mhz", "power_w", "layout", "host_us"),
}
SMALL = ["--device", "cpu", "--shapes", "16,24,40"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "gemm", *arguments])


def test_rows_have_every_field_and_survive_json():
    result = gemm.bench(CPU, shapes=[(16, 24, 40), (1, 8, 8)])
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"] == result.rows
    assert {(row["op"], row["dtype"], row["epilogue"], row["peer"]) for row in result.rows} == {
        (op, dtype, epilogue, "torch_fp32")
        for op, dtype in (("gemm", "float32"), ("gemm", "bfloat16"), ("gemm_int8", "int8"))
        for epilogue in ("none", "bias_relu")
    }
    assert len(result.rows) == 12
    assert not result.wrong
    for row in result.rows:
        assert row.keys() >= FIELDS
        assert row["shape"] in ([16, 24, 40], [1, 8, 8])
        m, n, k = row["shape"]
        assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"], rel=1e-3, abs=1e-4)
        assert row["tflops"] == pytest.approx(2 * m * n * k / row["us"] / 1e6, abs=1e-3)
        assert (row["tier"], row["layout"], row["density"], row["gpu"]) == ("cpu", "nt", None, None)
        assert row["precision"] == ("ieee" if row["dtype"] == "float32" else None)
        assert 0 <= row["error"] < 1e-2


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("layout", "shapes"), [("nt", [(2, 5), (3, 5)]), ("nn", [(2, 3), (5, 3)]), ("tn", [(3, 2), (5, 2)])]
)
def test_a_layout_is_one_of_the_products_of_a_layer(dtype, layout, shapes):
    """x (2, 5), w (3, 5), dy (2, 3): the forward product, the input's gradient, the weight's gradient."""
    given = gemm.problem((2, 3, 5), dtype, layout, CPU)
    assert [tuple(given.a.shape), tuple(given.b.shape)] == shapes
    assert given.bias.shape == (shapes[1][0],)
    stored = [given.a.is_contiguous(), given.b.is_contiguous()]
    assert stored == {"nt": [True, True], "nn": [True, False], "tn": [False, False]}[layout]
    assert {given.a.dtype, given.b.dtype, given.bias.dtype} == {getattr(torch, dtype)}
    assert given.flop == 2 * 2 * 3 * 5
    size = given.a.element_size()
    assert given.nbytes("none") == size * (2 * 5 + 3 * 5 + 2 * 3)
    assert given.nbytes("bias_relu") == given.nbytes("none") + size * shapes[1][0]
    again = gemm.problem((2, 3, 5), dtype, layout, CPU)
    assert torch.equal(given.a, again.a)


def test_all_layouts_run_and_only_the_forward_product_has_an_epilogue():
    result = gemm.bench(CPU, dtypes=["float32"], shapes=[(16, 24, 40)], layouts=gemm.LAYOUTS)
    assert [(row["layout"], row["epilogue"]) for row in result.rows] == [
        ("nt", "none"),
        ("nt", "bias_relu"),
        ("nn", "none"),
        ("tn", "none"),
    ]
    assert not result.wrong


def test_a_wrong_kernel_prints_no_time_and_fails_the_command(monkeypatch, tmp_path):
    right = kernels.gemm

    def wrong(*arguments, **options):
        out = right(*arguments, **options)
        if out.dtype == torch.bfloat16:
            out[-1, -1] += 1000
        return out

    monkeypatch.setattr(kernels, "gemm", wrong)
    out = tmp_path / "rows.jsonl"
    result = run(*SMALL, "--json", "--out", str(out))
    assert result.exit_code == WRONG == 1
    found = json.loads(result.stdout)
    assert found["wrong"] == 2
    for row in found["rows"]:
        assert row["correct"] is (row["dtype"] != "bfloat16")
        assert (row["us"] is None) == (row["ratio"] is None) == (row["dtype"] == "bfloat16")
        assert row["error"] > 0
    assert [mean["ratio"] is None for mean in found["means"]] == [m["dtype"] == "bfloat16" for m in found["means"]]
    assert [json.loads(line) for line in out.read_text().splitlines()] == found["rows"]
    assert "WRONG" in result.stderr


def test_a_kernel_that_gives_nan_fails_too(monkeypatch):
    right = kernels.gemm

    def nan(*arguments, **options):
        return right(*arguments, **options) * float("nan")

    monkeypatch.setattr(kernels, "gemm", nan)
    result = run(*SMALL, "--dtype", "float32")
    assert result.exit_code == WRONG
    assert "not finite" in result.stdout


def test_json_is_one_object_on_standard_output_and_nothing_else(tmp_path):
    command = [sys.executable, "-W", "error", "-m", "qsparse", "bench", "gemm", *SMALL, "--dtype", "float32", "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, env=environment, check=True)
    found = json.loads(done.stdout)
    assert done.stdout.count("\n") == 1
    assert len(found["rows"]) == 2
    assert "16, 24, 40" in done.stderr
    assert list(tmp_path.iterdir()) == []


def test_rows_are_appended_to_the_file(tmp_path):
    out = tmp_path / "rows.jsonl"
    for _ in range(2):
        assert run(*SMALL, "--dtype", "float32", "--out", str(out)).exit_code == 0
    assert len(out.read_text().splitlines()) == 4


@pytest.mark.parametrize(
    "arguments",
    [
        ["--shapes", "16,24"],
        ["--shapes", "16,24,0"],
        ["--shapes", "big"],
        ["--dtype", "float64"],
        ["--layout", "tt"],
        ["--repetitions", "0"],
        ["--device", "cpu", "--duel"],
        ["--device", "cpu", "--tier", "sm80"],
        ["--device", "cpu", "--dtype", "int8", "--layout", "nn"],
        ["--device", "cpu", "--tune"],
    ],
)
def test_what_does_not_serve_is_refused_before_anything_runs(arguments):
    result = run(*arguments)
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_int8_on_a_gpu_is_refused():
    with pytest.raises(UserError, match="CPU only"):
        gemm.bench(torch.device("cuda", 0), dtypes=["int8"])


def test_a_tier_that_the_face_refuses_is_the_users_mistake(monkeypatch):
    def refuse(*arguments, **options):
        raise ValueError(f"tier {options['tier']} is not possible")

    monkeypatch.setattr(kernels, "gemm", refuse)
    with pytest.raises(UserError, match="--tier sm80 with float32 nt 1,2,3: tier sm80 is not possible"):
        gemm._measure((1, 2, 3), "float32", "nt", CPU, {}, 1, "sm80")


@pytest.mark.parametrize(("tier", "dtypes"), [(None, gemm.GPU_DTYPES), ("sm80", ("float16", "bfloat16"))])
def test_a_tier_is_measured_in_the_dtypes_that_it_has(monkeypatch, tier, dtypes):
    measured = []
    monkeypatch.setattr(gemm, "_measure", lambda shape, dtype, *more, **options: measured.append(dtype) or [])
    monkeypatch.setattr(gemm, "copy_gbps", lambda device: 1000.0)
    monkeypatch.setattr(gemm, "environment", lambda device: {})
    gemm.bench(torch.device("cuda", 0), shapes=[gemm.LARGEST], tier=tier, duel=False)
    assert tuple(measured) == dtypes


def test_the_duel_is_float32s_and_of_no_tier(monkeypatch):
    dueled = []
    monkeypatch.setattr(gemm, "_measure", lambda *arguments, **options: [])
    monkeypatch.setattr(gemm, "run_duel", lambda *arguments: dueled.append(arguments) or [])
    monkeypatch.setattr(gemm, "copy_gbps", lambda device: 1000.0)
    monkeypatch.setattr(gemm, "environment", lambda device: {})
    for options in ({"dtypes": ["float16"]}, {"tier": "sm90"}, {"duel": False}):
        gemm.bench(torch.device("cuda", 0), shapes=[gemm.LARGEST], **options)
    assert not dueled
    gemm.bench(torch.device("cuda", 0), shapes=[gemm.LARGEST])
    assert len(dueled) == 1


def make_row(shape, ratio, **fields):
    row = dict.fromkeys((*FIELDS, *summary.GROUP)) | {"shape": list(shape), "ratio": ratio}
    return row | {"op": "gemm", "dtype": "float16", "epilogue": "none", "layout": "nt", "peer": "cublas"} | fields


def test_means_are_geometric_by_group_and_apart_for_large_products():
    rows = [
        make_row((64, 64, 64), 0.5),
        make_row((2048, 2048, 2048), 2.0),
        make_row((8192, 1024, 1024), 8.0),
        make_row((64, 64, 64), 3.0, peer="cublaslt"),
        make_row((64, 64, 64), None, dtype="bfloat16"),
    ]
    first, second, third = summary.means(rows)
    assert first["ratio"] == pytest.approx(2.0)
    assert first["ratio_from_2048"] == pytest.approx(4.0)
    assert (first["worst_ratio"], first["worst_shape"], first["shapes"]) == (0.5, [64, 64, 64], 3)
    assert (second["peer"], second["ratio"], second["ratio_from_2048"]) == ("cublaslt", 3.0, None)
    assert (third["ratio"], third["worst_ratio"], third["worst_shape"]) == (None, None, None)


def test_the_ceiling_is_the_best_of_ours_and_the_peers_at_the_largest_shape():
    ceilings = summary.Ceilings(gbps=1000.0)
    work = 2 * 8192**3
    ceilings.learn(
        [
            make_row((8192, 8192, 8192), 0.9, us=1000.0, peer_us=900.0),
            make_row((8192, 8192, 8192), 1.1, us=1000.0, peer_us=1100.0, peer="cublaslt"),
            make_row((8192, 8192, 8192), 1.1, us=1.0, peer_us=1.0, epilogue="bias_relu"),
            make_row((64, 64, 64), 1.1, us=1.0, peer_us=1.0),
            make_row((8192, 8192, 8192), None, us=None, peer_us=None),
        ]
    )
    assert ceilings.tflops == {("float16", None): pytest.approx(work / 900 / 1e6)}
    top = ceilings.tflops["float16", None]
    share = ceilings.share(make_row((1, 1, 1), 1.0, us=5.0, tflops=top / 2, gbps=100.0))
    assert (share["percent_of_ceiling"], share["bound"]) == (50.0, "compute")
    share = ceilings.share(make_row((1, 1, 1), 1.0, us=5.0, tflops=top / 2, gbps=750.0))
    assert (share["percent_of_ceiling"], share["bound"]) == (75.0, "memory")
    assert ceilings.share(make_row((1, 1, 1), 1.0, us=5.0, dtype="float32", tflops=1.0))["percent_of_ceiling"] is None
    for row, gbps in (
        (make_row((8, 8), 1.0, us=5.0, gbps=600.0), None),  # nothing is multiplied
        (make_row((1, 8, 8), 1.0, us=5.0, tflops=top, gbps=900.0, dtype="int8wo"), 1500.0),
    ):
        share = ceilings.share(row, gbps)
        assert (share["percent_of_ceiling"], share["bound"], share["ceiling_tflops"]) == (60.0, "memory", None)


def test_the_largest_shape_is_measured_first():
    shapes = [(1, 2, 3), gemm.LARGEST]
    order = list(gemm._order(("nn", "nt"), shapes))
    assert order[0] == ("nt", gemm.LARGEST)
    assert sorted(order) == sorted((layout, shape) for layout in ("nn", "nt") for shape in shapes)


def test_peers_stand_beside_each_other_in_the_table(capsys):
    common = {"us": 12.5, "us_p10": 12.0, "us_p90": 13.0, "tflops": 1.0, "gbps": 2.0, "error": 1e-4, "correct": True}
    common |= {"tier": "sm90", "timer": "cuda_graph", "host_us": 5.0, "peer_host_us": 15.0}
    shapes = ((1, 2, 3), (4, 5, 6))
    rows = [
        make_row(shape, ratio, peer=peer, peer_us=12.5 * ratio, **common)
        for shape in shapes
        for peer, ratio in (("cublas", 1.25), ("cublaslt", 0.8))
    ]
    tables.show(rows, summary.means(rows), "of something")
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if line.strip().startswith(("1, 2, 3", "4, 5, 6", "geometric"))]
    assert len(lines) == 3
    for line in lines:
        assert line.index("1.250x") < line.index("0.800x")
    assert "5 / 15" in lines[0]
    assert "Percent of something." in text


@pytest.mark.gpu
def test_a_run_on_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    given = gemm.problem((256, 256, 784), "float16", "nt", device)
    variants = [gemm.Variant(epilogue, None) for epilogue in gemm.EPILOGUES]
    rows = gemm.measure_problem(given, variants, gemm.environment(device), repetitions=50)
    assert [row["peer"] for row in rows] == ["cublas", "cublaslt", "torch_eager", "torch._addmm_activation"]
    for row in rows:
        assert row["correct"]
        assert row["repetitions"] == 50
        assert row["tier"] == kernels.gemm.tier(device)
        assert row["launches"][0].startswith("gemm_")
        assert row["us"] > 0
        assert row["host_us"] > 0
        assert row["peer_host_us"] > 0
        assert row["sm_clock_mhz"] is None or row["sm_clock_mhz"] > 0
