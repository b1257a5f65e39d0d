"""Rows -> what they say together: the share of the device's ceilings that each reached, and the mean of each group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import IO

from qsparse.bench.harness import geometric_mean
from qsparse.bench.shapes import LARGEST

GROUP = ("op", "dtype", "precision", "activations", "out_dtype", "epilogue", "layout")
"""The fields that a table's rows have in common; its means are of one peer each. A benchmark may lack some."""

NO_CEILING = {"percent_of_ceiling": None, "bound": None, "ceiling_tflops": None, "ceiling_gbps": None}

_GROWN = 2048**3  # "2048³ and above"


def group(row: dict) -> tuple:
    """What a row's table has in common."""
    return tuple(row.get(name) for name in GROUP)


@dataclass
class Ceilings:
    """The most that this device reached in this run: TFLOP/s by (dtype, precision), and GB/s of a copy."""

    gbps: float
    tflops: dict[tuple[str, str | None], float] = field(default_factory=dict)

    def know(self, dtype: str) -> bool:
        return any(known == dtype for known, _ in self.tflops)

    def learn(self, rows: Iterable[dict]) -> None:
        """Take the best of ours and the peers' plain products from rows of the largest shape."""
        for each in rows:
            if tuple(each["shape"]) == LARGEST and each["epilogue"] == "none" and each["layout"] == "nt":
                key = each["dtype"], each["precision"]
                fastest = min((us for us in (each["us"], each["peer_us"]) if us), default=None)
                if fastest:
                    work = 2 * LARGEST[0] * LARGEST[1] * LARGEST[2]
                    self.tflops[key] = max(self.tflops.get(key, 0.0), work / fastest / 1e6)

    def share(self, each: dict, gbps: float | None = None) -> dict:
        """The row's percent of the ceiling: the least time that work and bytes allow, over the time taken.

        A row without TFLOP/s, or with a bandwidth of its own in `gbps`, has bytes to move and no work to speak of.
        """
        works = each["tflops"] and not gbps
        compute = self.tflops.get((each["dtype"], each.get("precision"))) if works else None
        if not each["us"] or (works and not compute):
            return NO_CEILING
        gbps = gbps or self.gbps
        shares = {"memory": each["gbps"] / gbps}
        if works:
            shares["compute"] = each["tflops"] / compute
        bound = max(shares, key=shares.__getitem__)
        return {
            "percent_of_ceiling": round(100 * shares[bound], 2),
            "bound": bound,
            "ceiling_tflops": round(compute, 1) if works else None,
            "ceiling_gbps": round(gbps, 0),
        }


def means(rows: Iterable[dict]) -> list[dict]:
    """The geometric mean of the ratios of each group and peer, over all shapes and over those of 2048³ and more.

    A mean is null where a shape has no ratio (a wrong kernel, or none that large).
    """
    groups: dict[tuple, list[dict]] = {}
    for each in rows:
        groups.setdefault((*group(each), each["peer"]), []).append(each)
    found = []
    for key, members in groups.items():
        worst = min((each for each in members if each["ratio"]), key=lambda each: each["ratio"], default=None)
        found.append(
            dict(zip((*GROUP, "peer"), key, strict=True))
            | {
                "shapes": len(members),
                "ratio": _mean(members),
                "ratio_from_2048": _mean([each for each in members if _is_grown(each["shape"])]),
                "worst_ratio": worst and worst["ratio"],
                "worst_shape": worst and worst["shape"],
            }
        )
    return found


def _is_grown(shape: list[int]) -> bool:
    return len(shape) == 3 and shape[0] * shape[1] * shape[2] >= _GROWN


def _mean(rows: list[dict]) -> float | None:
    if not rows or not all(each["ratio"] for each in rows):
        return None
    return round(geometric_mean(each["ratio"] for each in rows), 4)


@dataclass(frozen=True)
class Result:
    """All rows of a run, the mean of each group, and what the ceilings were."""

    rows: list[dict]
    means: list[dict]
    ceiling: str | None

    @property
    def wrong(self) -> list[dict]:
        """Rows whose kernel gave a wrong output."""
        return [each for each in self.rows if not each["correct"]]

    def to_json(self) -> dict:
        return {"rows": self.rows, "means": self.means, "ceiling": self.ceiling, "wrong": len(self.wrong)}

    def show(self, file: IO[str]) -> None:
        """Print the tables."""
        from qsparse.bench.tables import show

        show(self.rows, self.means, self.ceiling, file)
