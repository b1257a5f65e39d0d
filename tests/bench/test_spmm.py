"""`qsparse bench spmm` on a CPU, and what it makes of times."""

import json

import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli, kernels
from qsparse.bench import harness, spmm
from qsparse.bench.command import WRONG
from qsparse.errors import UserError

CPU = torch.device("cpu")
SMALL = ["bench", "spmm", "--device", "cpu", "--shapes", "16,24,40"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)


def test_rows_means_and_crossovers(tmp_path):
    out = tmp_path / "rows.jsonl"
    result = CliRunner().invoke(cli.app, [*SMALL, "--density", "0.5", "--density", "0.1", "--out", str(out), "--json"])
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    assert found["wrong"] == 0
    assert found["rows"] == [json.loads(line) for line in out.read_text().splitlines()]
    assert {(row["op"], row["density"]) for row in found["rows"]} == {
        (op, density) for op in ("spmm_csr", "spmm_coo", "spmm_csr_transposed") for density in (0.5, 0.1)
    }
    for row in found["rows"]:
        assert row["shape"] == [16, 24, 40]
        assert row["correct"]
        assert row["tflops"] == pytest.approx(2 * row["nnz"] * 16 / row["us"] / 1e6, rel=1e-3)
        assert abs(row["nnz"] / (24 * 40) - row["density"]) < 0.1
    assert all(mean["cells"] == 2 for mean in found["means"])
    assert found["crossovers"][0]["shape"] == [16, 24, 40]


def test_tables_name_what_they_show():
    result = CliRunner().invoke(cli.app, [*SMALL, "--density", "0.1", "--op", "spmm_csr"])
    assert result.exit_code == 0, result.output
    for words in ("spmm_csr float32", "geometric mean", "torch_fp32", "Density below which"):
        assert words in result.output


def test_a_wrong_kernel_ends_with_an_error(monkeypatch):
    right = kernels.spmm_csr
    monkeypatch.setattr(kernels, "spmm_csr", lambda *args, **options: right(*args, **options) + 1)
    result = CliRunner().invoke(cli.app, [*SMALL, "--density", "0.1", "--op", "spmm_csr"])
    assert result.exit_code == WRONG
    assert "WRONG" in result.output


def test_what_a_cpu_does_not_do_is_refused():
    with pytest.raises(UserError, match=r"^--dtype float16"):
        spmm.bench(CPU, dtypes=("float16",))
    with pytest.raises(UserError, match=r"^--op sddmm has no peer on a CPU"):
        spmm.bench(CPU, ops=("sddmm",))
    with pytest.raises(UserError, match=r"^--op gemm_24: a CPU has no sparse tensor cores"):
        spmm.bench(CPU, ops=("spmm_csr", "gemm_24"))


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (
            {"ops": ("gemm_24", "gemm_int8_24"), "densities": (0.1,)},
            r"^--density 0\.1: gemm_24 has 2 of each 4 weights",
        ),
        ({"ops": ("gemm_int8_24",), "dtypes": ("float16",)}, r"^--dtype float16: gemm_int8_24 has nothing"),
        ({"ops": ("spmm_coo", "sddmm"), "dtypes": ("float32", "bfloat16")}, r"^--dtype bfloat16: spmm_coo, sddmm has"),
        ({"ops": ("spmm_bitmap",), "dtypes": ("float32",)}, r"^--dtype float32: spmm_bitmap has nothing"),
    ],
)
def test_what_nothing_could_be_measured_of_is_refused(options, said):
    with pytest.raises(UserError, match=said):
        spmm.bench(torch.device("cuda"), **options)


def row(density: float, us: float, peer: str, peer_us: float, plan: str = "kept", op: str = "spmm_csr") -> dict:
    return {
        "op": op,
        "dtype": "float32",
        "shape": [1, 2, 3],
        "density": density,
        "plan": plan,
        "us": us,
        "peer": peer,
        "peer_us": peer_us,
    }


def test_the_crossover_lies_where_the_times_meet():
    """A time that grows as the density meets a constant dense one where it must."""
    rows = [row(d, 1000 * d, "cublas", 70) for d in (0.02, 0.05, 0.1, 0.3)]
    rows += [row(d, 1000 * d, "torch_csr", 10000 * d) for d in (0.02, 0.05, 0.1, 0.3)]
    rows += [row(d, 5000 * d, "cublas", 70, plan="each call") for d in (0.02, 0.05, 0.1, 0.3)]
    rows += [row(d, 1, "cublas", 70, plan="kept, highest") for d in (0.02, 0.05, 0.1, 0.3)]  # is not float32's own
    rows += [row(0.02, 1, "cublas", 2, op="spmm_coo")]
    assert spmm.crossovers(rows) == [{"dtype": "float32", "shape": [1, 2, 3], "qsparse": 0.07, "torch_csr": 0.0}]
    assert spmm.crossovers([row(0.3, 5, "cublas", 6), row(0.1, 4, "cublas", 6)])[0]["qsparse"] is None
    assert spmm.crossovers([row(0.3, 5, "torch_csr", 6)]) == []


def test_a_mean_without_a_ratio_is_none():
    rows = [row(0.1, 1, "cublas", 2) | {"ratio": 2.0}, row(0.3, 1, "cublas", 8) | {"ratio": 8.0}]
    (mean,) = spmm.means(rows)
    assert (mean["ratio"], mean["worst_ratio"], mean["worst"]) == (4.0, 2.0, [1, 2, 3, 0.1])
    (mean,) = spmm.means([*rows, row(0.5, 1, "cublas", 2) | {"ratio": None}])
    assert (mean["ratio"], mean["worst_ratio"]) == (None, None)
