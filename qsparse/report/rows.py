"""Choosing, checking and naming rows."""

import sys
from collections.abc import Iterable
from typing import Any

_TEXTS = ("run", "variant", "peer", "kernel", "device", "gpu", "date")
_NUMBERS = ("accuracy", "accuracy_change", "agreement", "density", "weight_bytes", "weight_ratio")
_BY_BATCH = ("latency_us", "latency_us_p10", "latency_us_p90", "speedup")


def flaw(row: dict[str, Any]) -> str | None:
    """What keeps a row that somebody else wrote from being shown, None where nothing does. Null and absent are fine."""
    for field in _TEXTS:
        if not isinstance(row.get(field), str | None):
            return f"{field} is no text"
    for field in _NUMBERS:
        if row.get(field) is not None and not _is_number(row[field]):
            return f"{field} is no number"
    for field in _BY_BATCH:
        values = {} if row.get(field) is None else row[field]
        if not isinstance(values, dict) or not all(_is_number(value) and value > 0 for value in values.values()):
            return f"{field} holds no positive number for each batch"
    return None


def _is_number(value: object) -> bool:
    """Whether it is a number that a float holds: an integer of 400 digits is none that could be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= sys.float_info.max


def newest(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """The newest row (by date, then by place) of each (run, variant, peer, device), in order of first appearance."""
    latest: dict[tuple[Any, ...], dict[str, Any]] = {}
    for row in rows:
        key = tuple(row.get(field) for field in ("run", "variant", "peer", "device"))
        if key not in latest or (row.get("date") or "") >= (latest[key].get("date") or ""):
            latest[key] = row
    return list(latest.values())


def device_name(row: dict[str, Any]) -> str:
    """The GPU's full name, or "cpu"."""
    return row.get("gpu") or row.get("device") or "?"


def distinct(rows: list[dict[str, Any]], field: str) -> list[Any]:
    """The different values of a field, in order of first appearance."""
    return list(dict.fromkeys(row.get(field) for row in rows))
