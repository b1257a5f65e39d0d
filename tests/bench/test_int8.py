import functools
import json

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from qsparse import cli, kernels
from qsparse.bench import harness, int8
from qsparse.bench.command import WRONG
from qsparse.bench.peers import pytorch, torchao
from qsparse.errors import UserError
from qsparse.oracles import gemm_int8, quantize_rows

CPU = torch.device("cpu")
FIELDS = {
    *("op", "tier", "dtype", "shape", "density", "us", "us_p10", "us_p90", "peer", "peer_us", "ratio", "error"),
    *("gpu", "torch", "cuda", "date", "commit", "tflops", "percent_of_ceiling", "gbps", "epilogue", "activations"),
    *("sm_clock_mhz", "power_w", "layout", "host_us", "out_dtype"),
}
SMALL = ["--device", "cpu", "--shapes", "16,24,40"]


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)


def run(*arguments):
    return CliRunner().invoke(cli.app, ["bench", "int8", *arguments])


def test_rows_have_every_field_and_survive_json():
    result = int8.bench(CPU, shapes=[(16, 24, 40), (1, 8, 8)])
    assert json.loads(json.dumps(result.to_json(), allow_nan=False))["rows"] == result.rows
    assert not result.wrong
    assert {(row["op"], row["dtype"], row["activations"], row["out_dtype"], row["peer"]) for row in result.rows} == {
        ("gemm_int8", "int8", None, "int32", "torch._int_mm"),
        ("gemm_int8", "int8", None, "float16", "torch._int_mm"),
        ("gemm_int8", "int8", None, "float16", "torch_int8_eager"),
        ("gemm_int8", "int8", "dynamic", "float16", "torch_fp32"),
        ("gemm_fp8", "float8_e4m3fn", None, "float16", "torch_fp32"),
        ("gemm_weight_only", "int8wo", "float16", "float16", "torch_fp32"),
        ("gemm_weight_only", "int4wo", "float16", "float16", "torch_fp32"),
        *(("quantize_rows", dtype, None, "int8", "copy") for dtype in int8.QUANTIZED),
    }
    for row in result.rows:
        assert row.keys() >= FIELDS
        assert 0 < row["us_p10"] <= row["us"] <= row["us_p90"]
        assert row["ratio"] == pytest.approx(row["peer_us"] / row["us"], rel=1e-3, abs=1e-4)
        assert row["tier"] == "cpu"
        if row["op"] == "quantize_rows":
            assert row["shape"] in ([16, 40], [1, 8])
            assert row["tflops"] is None
        else:
            m, n, k = row["shape"]
            assert row["tflops"] == pytest.approx(2 * m * n * k / row["us"] / 1e6, abs=1e-3)
        if row["op"] in ("gemm_int8", "quantize_rows"):
            assert row["error"] == 0


@pytest.mark.parametrize("shape", [(3, 5, 7), (1, 4, 1), (20, 1, 33)])
def test_what_is_right_is_what_the_oracles_say(shape):
    given = int8.layer(shape, CPU)
    q, scale = quantize_rows.quantize_rows(given.x.float().numpy())
    assert np.array_equal(given.qx, q)
    assert np.array_equal(given.scale_x, scale)
    operands = (each.numpy() for each in (given.qx, given.qw, given.scale_x, given.scale_w, given.bias.float()))
    expected = gemm_int8.gemm_int8(*operands, relu=True).astype(np.float16)
    assert np.array_equal(given.scaled().values, expected)
    assert np.array_equal(given.acc, gemm_int8.accumulator(given.qx, given.qw))


def test_rows_of_zeros_are_quantized_too():
    q, scale = int8.quantized(torch.zeros(2, 3))
    assert q.tolist() == [[0, 0, 0], [0, 0, 0]]
    assert scale.tolist() == [1, 1]


@pytest.mark.parametrize(
    ("out_dtype", "wrong"),
    [(torch.int32, [("int32", None)]), (torch.float16, [("float16", None), ("float16", "dynamic")])],
)
def test_a_kernel_that_is_wrong_in_its_last_bit_prints_no_time(monkeypatch, tmp_path, out_dtype, wrong):
    def almost(right, *arguments, **options):
        out = right(*arguments, **options)
        if out.dtype == out_dtype:
            largest = out.flatten().argmax()
            raw = out.view(torch.int16 if out_dtype == torch.float16 else torch.int32).flatten()
            raw[largest] += 1
        return out

    for face in ("gemm_int8", "linear_int8"):
        monkeypatch.setattr(kernels, face, functools.partial(almost, getattr(kernels, face)))
    out = tmp_path / "rows.jsonl"
    result = run(*SMALL, "--op", "gemm_int8", "--json", "--out", str(out))
    assert result.exit_code == WRONG
    found = json.loads(result.stdout)
    assert [json.loads(line) for line in out.read_text().splitlines()] == found["rows"]
    assert found["wrong"] == sum(not row["correct"] for row in found["rows"])
    for row in found["rows"]:
        bad = (row["out_dtype"], row["activations"]) in wrong
        assert row["correct"] is not bad
        assert (row["us"] is None) == (row["ratio"] is None) == bad
    assert "WRONG" in result.stderr


def test_a_quantizer_that_rounds_otherwise_is_wrong(monkeypatch):
    right = kernels.quantize_rows

    def truncates(x):
        return (x.float() / right(x)[1][:, None]).to(torch.int8), right(x)[1]

    monkeypatch.setattr(kernels, "quantize_rows", truncates)
    result = int8.bench(CPU, ops=["quantize_rows"], shapes=[(16, 24, 40)])
    assert len(result.wrong) == len(result.rows) == len(int8.QUANTIZED)


def test_a_mode_of_compilation_that_no_peer_takes_is_refused():
    with pytest.raises(
        UserError, match=r"^--compile is of the peers of gemm_int8 and gemm_weight_only, not of gemm_fp8"
    ):
        int8.bench(torch.device("cpu"), ops=("gemm_fp8", "quantize_rows"), compile="default")


def test_a_peer_that_refuses_is_said_and_has_no_row(monkeypatch):
    def refuse(*operands):
        raise RuntimeError("self.size(0) needs to be greater than 16, but got 8\nmore")

    monkeypatch.setattr(torch, "_int_mm", refuse)
    said = []
    cases = int8.int8_cases(int8.layer((8, 16, 24), CPU), "off", said.append)
    assert [list(case.peers) for case in cases] == [[], [], ["torch_fp32"]]
    assert said == [
        "torch._int_mm refused: self.size(0) needs to be greater than 16, but got 8",
        "torch_int8_eager refused: self.size(0) needs to be greater than 16, but got 8",
    ]


def test_only_what_was_asked_for_is_measured():
    result = int8.bench(CPU, ops=["quantize_rows"], shapes=[(4, 8, 16), (4, 32, 16)])
    assert [row["shape"] for row in result.rows] == [[4, 16]] * 3  # the outputs do not count


def test_a_single_element_has_a_copy_to_be_compared_with():
    result = int8.bench(CPU, ops=["quantize_rows"], shapes=[(1, 1, 1)])
    assert len(result.rows) == 3
    assert not result.wrong


def test_what_is_asked_for_twice_is_measured_once():
    result = run(*SMALL, *SMALL, "--op", "quantize_rows", "--op", "quantize_rows", "--json")
    assert len(json.loads(result.stdout)["rows"]) == 3


def test_json_is_one_object_on_standard_output():
    result = run(*SMALL, "--op", "quantize_rows", "--json")
    assert result.exit_code == 0
    assert result.stdout.count("\n") == 1
    assert len(json.loads(result.stdout)["rows"]) == 3
    assert "quantize_rows float16" in result.stderr
    assert "M, K " in result.stderr


@pytest.mark.parametrize(
    "arguments", [["--shapes", "16,24"], ["--op", "gemm"], ["--compile", "fast"], ["--repetitions", "0"]]
)
def test_what_does_not_serve_is_refused_before_anything_runs(arguments):
    result = run(*arguments, "--device", "cpu")
    assert result.exit_code == 2
    assert result.stdout == ""
    assert "Traceback" not in result.stderr


def test_an_unknown_mode_of_compiling_is_the_users_mistake():
    with pytest.raises(UserError, match="--compile 'fast'"):
        int8.bench(CPU, compile="fast")


def test_float8_of_a_row_uses_its_range(normal):
    x = torch.cat((normal(4, 32), torch.zeros(1, 32)))
    q, scale = pytorch.float8(x)
    assert q.dtype == torch.float8_e4m3fn
    assert torch.equal(q.float().abs().amax(1), torch.tensor([448.0] * 4 + [0.0]))
    torch.testing.assert_close(q.float() * scale[:, None], x, rtol=2**-4, atol=1e-3)


def test_torchao_stands_there_only_compiled_and_installed(normal, monkeypatch):
    operands = normal(4, 16), normal(8, 16), normal(8)
    assert torchao.int8_layers(*operands, "off", "torchao") == {}
    monkeypatch.setattr(torchao, "installed", lambda: False)
    assert torchao.int8_layers(*operands, "default", "torchao") == {}


@pytest.mark.gpu
def test_a_run_on_the_gpu():
    device = torch.device("cuda", torch.cuda.current_device())
    said = []
    result = int8.bench(device, shapes=[(16, 256, 784)], repetitions=10, say=said.append)
    assert not result.wrong
    assert any(line.startswith("torch._int_mm refused") for line in said)
    assert {(row["op"], row["out_dtype"], row["activations"], row["peer"]) for row in result.rows} == {
        ("gemm_int8", "float16", None, "torch._scaled_mm"),
        ("gemm_int8", "float16", "dynamic", "torch_eager_fp16"),
        ("gemm_int8", "float16", "dynamic", "torch._addmm_activation_fp16"),
        ("gemm_fp8", "float16", None, "torch._scaled_mm"),
        ("gemm_weight_only", "float16", "float16", "cublas"),
        ("gemm_weight_only", "float16", "float16", "cublaslt"),
        ("quantize_rows", "int8", None, "copy"),
    }
    for row in result.rows:
        assert row["us"] > 0
        assert row["peer_us"] > 0
        assert row["launches"]
        assert (row["bound"] == "memory") == (row["op"] in ("gemm_weight_only", "quantize_rows"))
