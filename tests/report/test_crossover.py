"""Where sparse begins to win."""

import pytest

from qsparse.report.crossover import crossovers, sentences


def row(density, speedup, ratio):
    return {"density": density, "speedup": {"1": speedup, "1024": speedup / 2}, "weight_ratio": ratio}


def test_between_two_densities_it_is_a_straight_line_of_logarithms():
    found = crossovers([row(None, 1.0, 1.0), row(0.4, 0.5, 0.8), row(0.1, 2.0, 0.2), row(0.01, 8.0, 0.02)])
    assert found["1"] == pytest.approx(0.2)  # half way between 0.1 and 0.4, as 0.5 and 2 are around 1
    assert found["1024"] == pytest.approx(0.01 * 10**1.0)  # 4 at 0.01, and just 1 at 0.1
    assert found["bytes"] is None
    assert crossovers([row(0.5, 0.4, 1.1), row(0.1, 0.9, 1.01)]) == {"1": 0.0, "1024": 0.0, "bytes": 0.0}
    assert crossovers([{"density": None, "speedup": {"1": 3.0}}]) == {}


def test_the_densest_that_gains_counts():
    found = crossovers([row(0.4, 0.5, 1), row(0.2, 1.5, 1), row(0.1, 0.8, 1), row(0.05, 3.0, 1)])
    assert 0.2 < found["1"] < 0.4


def test_what_auto_stored_densely_gains_nothing():
    found = crossovers([row(0.9, 1.02, 0.99) | {"format": "dense"}, row(0.1, 4.0, 0.2) | {"format": "bitmap"}])
    assert found == {what: pytest.approx(0.9) for what in ("1", "1024", "bytes")}


def test_the_sentence():
    text = sentences({"1": 0.2, "1024": 0.0, "bytes": None})
    assert text == (
        "Crossovers: faster at batch 1 below density 0.2; faster at batch 1,024 at none; "
        "smaller than dense at all these densities."
    )
    assert sentences({}) == ""
