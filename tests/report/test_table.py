import io
import re

import pytest
from rich.console import Console

from qsparse.report import show, table


def make_row(variant, **fields):
    row = {
        "run": "runs/3",
        "variant": variant,
        "peer": None,
        "density": None,
        "accuracy": 0.9781,
        "accuracy_change": 0.0,
        "agreement": 1.0,
        "latency_us": {"1": 21.04, "64": 80.0, "1024": 903.6, "10000": 22_000.0},
        "speedup": {"1": 1.0, "64": 1.0, "1024": 1.0, "10000": 1.0},
        "weight_bytes": 814_120,
        "weight_ratio": 1.0,
        "kernel": "gemm:cpu",
        "device": "cpu",
        "gpu": None,
        "timer": "wall",
    }
    return row | fields


BASELINE = make_row("baseline")
INT8 = make_row(
    "int8",
    accuracy=0.97795,
    accuracy_change=-0.015,
    agreement=0.9951,
    latency_us={"1": 31.2, "64": 77.0, "1024": 456.0, "10000": 1_234_567.0},
    speedup={"1": 0.674, "64": 1.039, "1024": 1.98, "10000": 123.4},
    weight_bytes=205_392,
    weight_ratio=205_392 / 814_120,
    kernel="gemm_int8:cpu (torch._int_mm), quantize_rows:cpu (a long remark on what ran)",
)
SPARSE = make_row("csr-0.1", density=0.0999980, kernel="spmm_csr:simt", device="cuda", gpu="NVIDIA H200")
EXPECTED_INT8 = (
    *("int8", "97.80 %", "-0.01", "99.51 %", "205,392", "25.2 %"),
    *("31.2 µs", "77.0 µs", "456 µs", "1.23 s", "0.67x", "1.04x", "1.98x", "123x"),
)


def piped(rows):
    """The table as a pipe or a file gets it."""
    out = io.StringIO()
    show(rows, out)
    return out.getvalue()


def rendered(rows, width):
    """The table as a terminal of this width gets it, without colours."""
    console = Console(file=io.StringIO(), width=width)
    console.print(table(rows, width))
    return console.file.getvalue()


def cells_of(text, first, heading="accuracy"):
    """The table's two lines that begin with the cell `first`, cut into cells at the columns' gaps."""
    lines = text.splitlines()
    assert any(heading in line for line in lines)
    start = next(i for i, line in enumerate(lines) if line.startswith(first + " "))
    return [cell for line in lines[start : start + 2] for cell in re.split(r"\s{2,}", line.strip())]


def test_a_pipe_gets_every_value_on_two_lines_without_escapes():
    text = piped([BASELINE, INT8, SPARSE])
    assert "\x1b" not in text
    assert "…" not in text
    assert text.splitlines()[0].strip() == "runs/3"
    assert cells_of(text, "int8") == [
        *("int8", "97.80 %", "99.51 %", "31.2 µs", "77.0 µs", "456 µs", "1.23 s", "205,392"),
        *("gemm_int8:cpu (torch._int_mm), quantize_rows:cpu (a long", "cpu"),
        *("-0.01", "0.67x", "1.04x", "1.98x", "123x", "25.2 %", "remark on what ran)"),
    ]
    assert cells_of(text, "baseline") == [
        *("baseline", "97.81 %", "100.00 %", "21.0 µs", "80.0 µs", "904 µs", "22.0 ms", "814,120", "gemm:cpu", "cpu"),
        *("0.00", "1.00x", "1.00x", "1.00x", "1.00x", "100.0 %"),
    ]
    assert cells_of(text, "csr-0.1")[-6:] == ["0.00", "1.00x", "1.00x", "1.00x", "1.00x", "100.0 %"]
    assert "density 0.1 " in text
    assert "NVIDIA H200" in text


@pytest.mark.parametrize("width", [80, 100, 120, 140, 200])
def test_nothing_is_lost_at_any_width(width):
    text = rendered([BASELINE, INT8, SPARSE], width)
    assert "…" not in text
    assert max(len(line) for line in text.splitlines()) <= width
    together = " ".join(text.split())
    for value in (*EXPECTED_INT8, "814,120", "spmm_csr:simt", "NVIDIA H200", "gemm_int8:cpu", "(torch._int_mm),"):
        assert value in together, value


def test_a_narrow_terminal_has_the_kernels_below():
    assert "kernel" in rendered([BASELINE, SPARSE], 120)
    narrow = rendered([BASELINE, SPARSE], 80)
    assert "kernel" not in narrow
    assert "\ncsr-0.1: spmm_csr:simt, NVIDIA H200" in narrow


def test_headings_say_what_the_columns_are():
    def columns(text):  # each heading from its top line to its bottom one
        lines = text.splitlines()
        rule = next(i for i, line in enumerate(lines) if line.startswith("──"))
        above = [line.ljust(len(lines[rule])) for line in lines[1:rule]]
        ends = [match.end() for match in re.finditer(r"\S+( \S+)*", above[-1])]
        starts = [0, *ends[:-1]]
        return [" ".join(" ".join(line[a:b] for line in above).split()) for a, b in zip(starts, ends, strict=True)]

    expected = ["variant", "accuracy (change)", "agrees", "latency batch 1", "latency batch 64"]
    expected += ["latency batch 1,024", "latency batch 10,000", "weight bytes"]
    short = [BASELINE, make_row("csr-0.1-ft2", density=0.1)]
    assert columns(rendered(short, 80)) == expected
    assert columns(rendered(short, 140))[:-2] == expected
    assert columns(piped(short)) == [*expected, "kernel", "device"]
    assert "\ncsr-0.1-ft2 " in rendered(short, 80)  # names stay whole where headings can give way
    assert "\ndensity 0.1 " in rendered(short, 80)


@pytest.mark.parametrize(
    ("microseconds", "text"),
    [
        (0.05, "0.0500 µs"),
        (3.0, "3.00 µs"),
        (99.96, "100 µs"),
        (999.4, "999 µs"),
        (999.6, "1.00 ms"),
        (22_000.0, "22.0 ms"),
        (1e6, "1.00 s"),
    ],
)
def test_times_have_three_digits(microseconds, text):
    assert text in cells_of(piped([make_row("int8", latency_us={"1": microseconds}, speedup={})]), "int8")


def test_several_runs_get_a_column():
    text = piped([BASELINE, make_row("baseline", run="runs/4")])
    assert cells_of(text, "runs/3")[:3] == ["runs/3", "baseline", "97.81 %"]
    assert cells_of(text, "runs/4")[:3] == ["runs/4", "baseline", "97.81 %"]


def test_missing_fields_show_as_a_dash():
    text = piped([{"variant": "bare", "latency_us": {"64": 3.0}}])
    assert cells_of(text, "bare")[:10] == ["bare", "-", "-", "-", "3.00 µs", "-", "-", "-", "-", "?"]


def test_brackets_in_a_name_are_not_markup():
    assert "[red]x[/red]" in piped([make_row("[red]x[/red]")])
    assert "a[/b]" in piped([make_row("int8", run="a[/b]")])
    unsteady = make_row("x[/b]", latency_us_p10={"1": 1.0}, latency_us_p90={"1": 9.0})
    assert "Unsteady: x[/b]" in piped([unsteady])
    assert "x[/b]: gemm:cpu, cpu" in rendered([unsteady], 40)


def test_the_caption_says_how_time_was_taken():
    assert "wall-clock time on the CPU" in piped([BASELINE])
    assert "CUDA-graph replay, L2 cache flushed" in piped([make_row("baseline", timer="cuda_graph")])


def test_times_taken_on_a_busy_machine_are_flagged():
    steady = make_row("baseline", latency_us_p10={"1": 20.0, "64": 70.0}, latency_us_p90={"1": 30.0, "64": 90.0})
    shaky = make_row("int8", latency_us_p10={"1": 20.0, "64": 70.0}, latency_us_p90={"1": 30.0, "64": 211.0})
    assert "busy" not in piped([steady])
    flagged = " ".join(piped([steady, shaky]).split())
    assert "Unsteady: int8 took over 3x longer in some repetitions than in others. The machine was busy" in flagged


def test_no_rows_make_an_empty_table():
    assert "accuracy" in piped([])
