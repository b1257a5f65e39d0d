"""Choosing and naming rows."""

from collections.abc import Iterable


def newest(rows: Iterable[dict]) -> list[dict]:
    """The newest row (by date, then by place) of each (run, variant, peer, device), in order of first appearance."""
    latest: dict[tuple, dict] = {}
    for row in rows:
        key = tuple(row.get(field) for field in ("run", "variant", "peer", "device"))
        if key not in latest or (row.get("date") or "") >= (latest[key].get("date") or ""):
            latest[key] = row
    return list(latest.values())


def device_name(row: dict) -> str:
    """The GPU's full name, or "cpu"."""
    return row.get("gpu") or row.get("device") or "?"


def distinct(rows: list[dict], field: str) -> list:
    """The different values of a field, in order of first appearance."""
    return list(dict.fromkeys(row.get(field) for row in rows))
