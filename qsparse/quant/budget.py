"""What each layer costs in each dtype -> a dtype for each layer, within a budget of bytes or of accuracy.

Layers are taken to cost what they cost alone: the drops of a combination are added. That is an estimate; what is chosen
by accuracy is measured as a whole before it is taken.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from qsparse.errors import UserError


@dataclass(frozen=True)
class Plan:
    """A dtype for each layer; the bytes of all, and the estimated drop of the accuracy in points (at least 0)."""

    layers: dict[str, str]
    bytes: int
    drop: float


def plans(costs: Mapping[str, Mapping[str, tuple[int, float]]]) -> list[Plan]:
    """The combinations of which none is both smaller and better than another: the fewest bytes first.

    costs: layer -> dtype -> its bytes, and the change of the accuracy in points when the layer alone has it. A gain
    counts as no change: choosing by it would be choosing noise.
    """
    found = [Plan({}, 0, 0.0)]
    for layer, choices in costs.items():
        grown = [
            Plan({**plan.layers, layer: dtype}, plan.bytes + size, plan.drop + max(0.0, -change))
            for plan in found
            for dtype, (size, change) in choices.items()
        ]
        found, least = [], math.inf
        for plan in sorted(grown, key=lambda plan: (plan.bytes, plan.drop)):
            if plan.drop < least:
                found.append(plan)
                least = plan.drop
    return found


def within_bytes(found: Sequence[Plan], budget: int) -> Plan:
    """The plan of the least drop among those of at most `budget` bytes. found: as from `plans`."""
    fitting = [plan for plan in found if plan.bytes <= budget]
    if not fitting:
        raise UserError(f"--budget-bytes is {budget:,}: the smallest of these dtypes takes {found[0].bytes:,}.")
    return fitting[-1]


def within_drop(found: Sequence[Plan], budget: float, drop: Callable[[Plan], float]) -> Plan:
    """The smallest plan whose measured `drop`, in points, is at most `budget`. found: as from `plans`."""
    for plan in found:
        if drop(plan) <= budget:
            return plan
    raise UserError(f"--budget-drop is {budget:g} points: no choice of these dtypes keeps within it.")
