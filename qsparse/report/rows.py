"""Choosing, checking and naming rows."""

from collections.abc import Iterable
from typing import Any, TypeGuard

_TEXTS = ("run", "variant", "peer", "kernel", "device", "gpu", "date")
_NUMBERS = ("accuracy", "accuracy_change", "agreement", "density", "weight_bytes", "weight_ratio")
_SIGNED = ("accuracy_change",)
_LARGEST = 1e30
"""A number beyond it, or of a time closer to 0 than its inverse, was not measured, and cannot be drawn."""
_BY_BATCH = ("latency_us", "latency_us_p10", "latency_us_p90", "speedup")


def flaw(row: dict[str, Any]) -> str | None:
    """What keeps a row that somebody else wrote from being shown, None where nothing does. Null and absent are fine."""
    for field in _TEXTS:
        if not isinstance(row.get(field), str | None):
            return f"{field} is no text"
    for field in _NUMBERS:
        if row.get(field) is not None and not _is_number(row[field]):
            return f"{field} is no number"
        if field not in _SIGNED and (row.get(field) or 0) < 0:
            return f"{field} is below 0"
    for field in _BY_BATCH:
        values = {} if row.get(field) is None else row[field]
        if not isinstance(values, dict) or not all(map(_is_positive, values.values())):
            return f"{field} holds no positive number for each batch"
    return None


def _is_number(value: object) -> TypeGuard[float]:
    """Whether it is a number that could be drawn."""
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) <= _LARGEST


def _is_positive(value: object) -> bool:
    return _is_number(value) and value >= 1 / _LARGEST


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
