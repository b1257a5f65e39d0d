"""Choosing a dtype for each layer: against all combinations, and at the edges."""

import itertools
import random

import pytest

from qsparse.errors import UserError
from qsparse.quant.budget import Plan, plans, within_bytes, within_drop

COSTS = {
    "fc1": {"fp32": (400, 0.0), "int8": (100, -0.02), "int4wo": (50, -0.3)},
    "fc2": {"fp32": (40, 0.0), "int8": (10, +0.1), "int4wo": (5, -2.0)},
}


def test_by_hand():
    found = plans(COSTS)
    assert found[0] == Plan({"fc1": "int4wo", "fc2": "int4wo"}, 55, pytest.approx(2.3))
    assert found[1] == Plan({"fc1": "int4wo", "fc2": "int8"}, 60, pytest.approx(0.3))
    assert found[2] == Plan({"fc1": "int8", "fc2": "int8"}, 110, pytest.approx(0.02))
    assert found[3] == Plan({"fc1": "fp32", "fc2": "int8"}, 410, 0)  # a gain is no gain: fp32 of fc2 is not there
    assert len(found) == 4
    assert within_bytes(found, 409).layers == {"fc1": "int8", "fc2": "int8"}
    assert within_bytes(found, 10**9).bytes == 410
    with pytest.raises(UserError, match="--budget-bytes is 54: the smallest of these dtypes takes 55"):
        within_bytes(found, 54)


@pytest.mark.parametrize("seed", range(5))
def test_none_is_missed(seed):
    rng = random.Random(seed)
    costs = {f"fc{i}": {f"d{j}": (rng.randrange(1, 50), -rng.randrange(8) / 4) for j in range(4)} for i in range(5)}
    found = plans(costs)
    everything = [
        (sum(size for size, _ in each), sum(-change for _, change in each))
        for each in itertools.product(*(choices.values() for choices in costs.values()))
    ]
    for size in range(5, 250):
        drops = [drop for total, drop in everything if total <= size]
        if drops:
            assert within_bytes(found, size).drop == pytest.approx(min(drops))
    for plan in found:
        assert sum(costs[name][dtype][0] for name, dtype in plan.layers.items()) == plan.bytes


def test_a_drop_is_measured_not_believed():
    found = plans(COSTS)
    measured = {55: 3.0, 60: 0.5, 110: 0.09, 410: 0.0}
    assert within_drop(found, 0.1, lambda plan: measured[plan.bytes]).bytes == 110
    assert within_drop(found, 0.05, lambda plan: measured[plan.bytes]).bytes == 410
    with pytest.raises(UserError, match="--budget-drop is 0 points: no choice"):
        within_drop(found, 0, lambda plan: 1.0)
