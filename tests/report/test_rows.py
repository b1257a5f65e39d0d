from qsparse.report import newest


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
