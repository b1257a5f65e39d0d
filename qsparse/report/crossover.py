"""Rows of one network at several densities -> the density below which sparse storage beats the dense baseline."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any


def crossovers(rows: Iterable[Mapping[str, Any]]) -> dict[str, float | None]:
    """Of each batch size, and of "bytes": the density below which a variant is faster, or smaller, than its baseline.

    rows: of variants that differ by their density; the others (the baseline, libraries) are passed over. Where `auto`
    stored all layers densely nothing is gained, whatever the clock says. Between two measured densities the gains are
    taken as straight lines on a double logarithmic scale. 0 stands for never, None for a density above all measured
    ones.
    """
    gains: dict[str, dict[float, float]] = {}
    for row in rows:
        if row.get("density") is None:
            continue
        found = dict(row.get("speedup") or {})
        if row.get("weight_ratio"):
            found["bytes"] = 1 / row["weight_ratio"]
        for what, gain in found.items():
            gains.setdefault(what, {})[row["density"]] = 1.0 if row.get("format") == "dense" else gain
    return {what: _crossover(found) for what, found in gains.items()}


def sentences(found: Mapping[str, float | None]) -> str:
    """What `crossovers` returned, to read."""
    parts = []
    for what, density in found.items():
        where = "smaller than dense" if what == "bytes" else f"faster at batch {int(what):,}"
        when = "at all these densities" if density is None else f"below density {density:.3g}" if density else "at none"
        parts.append(f"{where} {when}")
    return f"Crossovers: {'; '.join(parts)}." if parts else ""


def _crossover(gains: Mapping[float, float]) -> float | None:
    """The density where the gain crosses 1; beyond the densest that gains, whatever sparser ones do."""
    densities = sorted(gains)
    best = max((density for density in densities if gains[density] > 1), default=0.0)
    if not best or best == densities[-1]:
        return None if best else 0.0
    above = densities[densities.index(best) + 1]
    over, under = math.log(gains[best]), math.log(gains[above])  # above 0, and at most 0
    return math.exp(math.log(best) + over / (over - under) * math.log(above / best))
