import io
import os

import pytest

from qsparse.report import flaw, newest, png, show


def row(n, run="runs/1", variant="int8", peer=None, device="cpu", date="2026-01-01T00:00:00+00:00"):
    return {"n": n, "run": run, "variant": variant, "peer": peer, "device": device, "date": date}


def numbers(rows):
    return [r["n"] for r in newest(rows)]


def test_the_newest_of_each_run_variant_peer_and_device_stays():
    later = "2026-01-02T00:00:00+00:00"
    rows = [
        row(0, variant="baseline"),
        row(1, date=later),
        row(2),  # older than 1, although it comes after it
        row(3, variant="baseline", date=later),
        row(4, run="runs/2"),
        row(5, device="cuda"),
        row(6, peer="torch_fp16_graph"),
    ]
    assert numbers(rows) == [3, 1, 4, 5, 6]


def test_of_one_date_the_last_stays():
    assert numbers([row(0), row(1)]) == [1]


def test_rows_without_fields_are_kept_apart_from_others():
    assert numbers([{"n": 0}, row(1), {"n": 2}]) == [2, 1]
    assert newest([]) == []


@pytest.mark.parametrize(
    ("fields", "what"),
    [
        ({"accuracy": "high"}, "accuracy is no number"),
        ({"accuracy": True}, "accuracy is no number"),
        ({"weight_bytes": "x"}, "weight_bytes is no number"),
        ({"weight_bytes": 1e308}, "weight_bytes is no number"),  # an axis around it is infinite
        ({"weight_bytes": -1}, "weight_bytes is below 0"),
        ({"accuracy": -0.1}, "accuracy is below 0"),
        ({"variant": ["x"]}, "variant is no text"),
        ({"date": 5}, "date is no text"),
        ({"accuracy": 10**400}, "accuracy is no number"),
        ({"latency_us": {"1024": 10**400}}, "latency_us holds no positive number for each batch"),
        ({"latency_us": {"1": 1e308}}, "latency_us holds no positive number for each batch"),
        ({"latency_us": {"1": 5e-324}}, "latency_us holds no positive number for each batch"),
        ({"latency_us": 5}, "latency_us holds no positive number for each batch"),
        ({"latency_us": {"1024": -3}}, "latency_us holds no positive number for each batch"),
        ({"latency_us_p90": {"1": None}}, "latency_us_p90 holds no positive number for each batch"),
    ],
)
def test_a_row_that_cannot_be_shown_is_told(fields, what):
    assert flaw({"accuracy": 0.5, **fields}) == what


@pytest.mark.parametrize("fields", [{}, dict.fromkeys(("variant", "device", "latency_us", "weight_bytes"))])
def test_missing_and_null_fields_are_shown(fields, tmp_path):
    row = {"accuracy": 0.5, **fields}
    assert flaw(row) is None
    show([row], io.StringIO())
    png([row], tmp_path / "p.png")


def test_names_that_are_no_characters_are_drawn(tmp_path):
    rows = [{"accuracy": 0.5, "run": os.fsdecode(b"runs/\xff"), "variant": name} for name in ("\ud800", "int8")]
    png([*rows, {"accuracy": 0.5, "run": "runs/2"}], tmp_path / "p.png")
    assert (tmp_path / "p.png").stat().st_size
