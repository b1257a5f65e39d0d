import json
import math
import time

import pytest
import torch

from qsparse.bench import harness
from qsparse.bench.harness import Call, Contender, Error, Measurement, Reference, Tolerance
from qsparse.errors import UserError
from qsparse.kernels import _load

CPU = torch.device("cpu")
TIGHT = Tolerance(1e-6, 1e-6)


@pytest.fixture(autouse=True)
def quick(monkeypatch):
    monkeypatch.setattr(harness, "_CPU_BUDGET_S", 0.01)


def contender(output, expected=None, tolerance=TIGHT):
    """A call that returns `output`, to be compared with `expected` (the same)."""
    expected = output if expected is None else expected
    return Contender(Call(lambda: output), Reference(expected.to(torch.float64)), tolerance)


def test_the_error_is_relative_to_the_reference():
    reference = Reference(torch.tensor([[3.0, 4.0]], dtype=torch.float64))
    error = reference.error(torch.tensor([[3.0, 4.5]]))
    assert error.norm == pytest.approx(0.5 / 5)
    assert error.worst == pytest.approx(0.5 / 4)
    assert reference.error(torch.tensor([[3.0, 4.0]])) == Error(0, 0)


def test_the_error_of_a_reference_of_zeros_is_absolute():
    error = Reference(torch.zeros(1, 2, dtype=torch.float64)).error(torch.tensor([[0.0, 0.25]]))
    assert error == Error(0.25, 0.25)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("rows", [None, torch.tensor([0])])
def test_what_is_not_finite_is_never_within_a_tolerance_even_where_it_is_not_sampled(bad, rows):
    right = torch.ones(2, 2)
    output = right.clone()
    output[1, 1] = bad
    reference = Reference((right if rows is None else right[rows]).to(torch.float64), rows)
    assert not reference.error(output).within(Tolerance(math.inf, math.inf))


def test_either_part_of_the_error_can_fail():
    assert Error(0.1, 0.1).within(Tolerance(0.2, 0.2))
    assert not Error(0.3, 0.1).within(Tolerance(0.2, 0.2))
    assert not Error(0.1, 0.3).within(Tolerance(0.2, 0.2))
    assert not Error(0.2, 0.1).within(Tolerance(0.2, 0.2))


def test_the_reference_is_the_float64_product(normal):
    a, b, bias = normal(5, 7), normal(3, 7), normal(3)
    expected = a.double() @ b.double().t()
    assert torch.equal(harness.product_reference(a, b).values, expected)
    fused = harness.product_reference(a, b, bias, relu=True).values
    assert torch.equal(fused, torch.clamp(expected + bias.double(), min=0))


def test_large_outputs_are_sampled_at_both_ends_and_between(normal):
    a, b = normal(5000, 3), normal(2, 3)
    reference = harness.product_reference(a, b)
    rows = reference.rows
    assert len(rows) == len(rows.unique()) == 512
    assert rows.sort().values.equal(rows)
    assert {*range(128), *range(4872, 5000)} <= set(rows.tolist())
    assert reference.error(a.double() @ b.double().t()) == Error(0, 0)


def test_a_wrong_kernel_has_an_error_and_no_time():
    right = torch.ones(2, 2)
    measured, _ = harness.compete(
        {"right": contender(right), "wrong": contender(right + 1, right)}, {"peer": contender(right)}, CPU
    )
    assert measured["wrong"] == Measurement(Error(1, 1), correct=False)
    assert measured["right"].correct
    assert 0 < measured["right"].us_p10 <= measured["right"].us <= measured["right"].us_p90
    assert measured["peer"].us > 0


def test_a_wrong_kernel_is_not_run_again():
    calls = []

    def wrong():
        calls.append(1)
        return torch.zeros(1, 1)

    given = Contender(Call(wrong), Reference(torch.ones(1, 1, dtype=torch.float64)), TIGHT)
    harness.compete({"wrong": given}, {}, CPU)
    assert len(calls) == 1


def test_a_kernel_that_goes_wrong_while_it_is_timed_has_no_time():
    outputs = iter([torch.ones(1, 1)])

    def wears_out():
        return next(outputs, torch.zeros(1, 1))

    given = Contender(Call(wears_out), Reference(torch.ones(1, 1, dtype=torch.float64)), TIGHT)
    measured, _ = harness.compete({"kernel": given}, {}, CPU)
    assert measured["kernel"] == Measurement(Error(1, 1), correct=False)


def test_a_kernel_that_cannot_run_is_wrong_and_says_why():
    def fails():
        raise RuntimeError("the launch failed")

    right = torch.ones(2, 2)
    broken = Contender(Call(fails), Reference(right.double()), TIGHT)
    measured, _ = harness.compete({"broken": broken, "right": contender(right)}, {"peer": contender(right)}, CPU)
    assert (measured["broken"].correct, measured["broken"].failure) == (False, "the launch failed")
    assert measured["right"].us > 0
    with pytest.raises(RuntimeError, match="the launch failed"):
        harness.compete({"right": contender(right)}, {"peer": broken}, CPU)


def test_running_out_of_memory_is_no_refusal():
    def exhausted():
        raise torch.cuda.OutOfMemoryError("none left")

    with pytest.raises(torch.cuda.OutOfMemoryError):
        harness.willing({"peer": Call(exhausted)}, Reference(torch.zeros(1)), TIGHT, print)


@pytest.mark.parametrize("wrapped", [False, True])
def test_a_peer_that_takes_too_long_is_named_and_left_out(monkeypatch, wrapped):
    monkeypatch.setattr(harness, "PATIENCE_S", 0.05)

    def slow():
        try:
            time.sleep(10)
        except RuntimeError as error:
            if wrapped:
                raise RuntimeError("the compiler raised") from error
            raise

    said, started = [], time.perf_counter()
    found = harness.willing({"slow": Call(slow), "quick": Call(list)}, Reference(torch.zeros(1)), TIGHT, said.append)
    assert list(found) == ["quick"]
    assert said == ["slow refused: not done within 0.05 s"]
    assert time.perf_counter() - started < 5
    time.sleep(0.1)  # and the clock has been stopped


def test_a_slow_first_call_is_said(monkeypatch):
    monkeypatch.setattr(harness, "_WORTH_SAYING_S", 0.0)
    said = []
    assert list(harness.willing({"peer": Call(list)}, Reference(torch.zeros(1)), TIGHT, said.append)) == ["peer"]
    assert said == ["peer: its first call took 0.0 s"]


def test_an_output_that_is_not_written_shows():
    given = Contender(Call(lambda: torch.empty(64, 64)), Reference(torch.zeros(64, 64, dtype=torch.float64)), TIGHT)
    measured, _ = harness.compete({"kernel": given}, {}, CPU)
    assert not measured["kernel"].correct
    assert math.isnan(measured["kernel"].error.norm)
    assert not torch.are_deterministic_algorithms_enabled()


def test_the_tier_is_that_of_the_kernels_that_were_launched(monkeypatch):
    monkeypatch.setattr(_load, "_function", lambda *arguments: lambda *launch: None)
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda index: 0, raising=False)
    monkeypatch.setattr(torch._C, "_cuda_getDevice", lambda: 0, raising=False)

    def kernel(*sources):
        def call():
            for source in sources:
                _load.launch(torch.device("cuda", 0), source, "name<1>", "", (), grid=1, block=1)
            return torch.ones(1, 1)

        return Contender(Call(call), Reference(torch.ones(1, 1, dtype=torch.float64)), TIGHT)

    kernels = {"none": kernel(), "one": kernel("a_sm80.cu"), "both": kernel("a_split.cu", "/b/a_sm90.cu")}
    function = _load._function
    measured, _ = harness.compete(kernels, {}, CPU)
    assert _load._function is function
    assert {name: measurement.tier for name, measurement in measured.items()} == {
        "none": "cpu",
        "one": "sm80",
        "both": "sm90",
    }
    assert measured["both"].launches == ("a_split.cu:name<1>", "a_sm90.cu:name<1>")


def test_slow_calls_are_repeated_less():
    assert harness._repetitions(100, [0.004, 0.005]) == 100
    assert harness._repetitions(100, [0.02, 0.04]) == 16
    assert harness._repetitions(15, [0.02, 0.04]) == 15
    assert harness._repetitions(100, [1.0]) == 10


def test_the_ratio_is_the_peers_time_over_ours_and_wrong_ones_have_none():
    ours = Measurement(
        Error(1e-7, 1e-7), True, us=10.0, us_p10=9.0, us_p90=12.0, repetitions=50, launches=("gemm_simt.cu:gemm",)
    )
    peer = Measurement(Error(2e-7, 1e-7), True, us=15.0)
    common = {"op": "gemm", "dtype": "float32", "shape": (1, 2, 3), "peer": "cublas"}
    common |= {"flop": 12_000_000, "nbytes": 5000, "environment": {"gpu": None}}
    row = harness.row(kernel=ours, against=peer, layout="nt", **common)
    assert row["ratio"] == 1.5
    assert (row["tflops"], row["gbps"]) == (1.2, 0.5)
    assert (row["error"], row["peer_error"]) == (1e-7, 2e-7)
    assert (row["shape"], row["layout"], row["density"]) == ([1, 2, 3], "nt", None)
    assert (row["tier"], row["launches"]) == ("simt", ["gemm_simt.cu:gemm"])

    wrong = Measurement(Error(math.nan, math.nan), False)
    for kernel, against in ((wrong, peer), (ours, wrong)):
        assert harness.row(kernel=kernel, against=against, **common)["ratio"] is None
    row = harness.row(kernel=wrong, against=peer, **common)
    assert [row[name] for name in ("us", "us_p10", "us_p90", "tflops", "gbps", "error")] == [None] * 6
    assert row["correct"] is False
    json.dumps(row, allow_nan=False)


def test_rows_are_appended(tmp_path):
    path = tmp_path / "new" / "rows.jsonl"
    harness.append(path, [{"a": 1}])
    harness.append(path, [{"a": 2}, {"a": 3}])
    assert [json.loads(line)["a"] for line in path.read_text().splitlines()] == [1, 2, 3]


def test_a_place_for_rows_that_is_none_is_refused_without_rows_too(tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "a.jsonl").mkdir()
    for path in (tmp_path / "a.jsonl", tmp_path / "file" / "rows.jsonl"):
        with pytest.raises(UserError, match=r"--out .* the rows cannot be written there: (Is a directory|File exists)"):
            harness.append(path, ())
    assert (tmp_path / "file").read_text() == "mine"


def test_no_file_but_of_rows_is_appended_to(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    with pytest.raises(UserError, match=r"config\.json is no file of rows: give it a name that ends in \.jsonl"):
        harness.append(tmp_path / "config.json", [{"a": 1}])
    assert (tmp_path / "config.json").read_text() == "{}"


def test_the_geometric_mean():
    assert harness.geometric_mean([0.5, 2.0, 8.0]) == pytest.approx(2.0)
    assert math.isnan(harness.geometric_mean([]))
