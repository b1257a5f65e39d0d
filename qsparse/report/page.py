"""Rows, and what the models hold -> one page that needs nothing else: no network, no file beside it."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from qsparse import __version__
from qsparse.errors import UserError

# What the page shows of a row, or filters by; the rest stays in rows.jsonl.
_MODEL_FIELDS = (
    *("run", "variant", "peer", "sizes", "dtype", "layers", "activations", "granularity", "calibration", "method"),
    *("format", "density", "distribution", "pattern", "finetune_epochs", "kernel", "simulated", "seed", "date"),
    *("accuracy", "accuracy_change", "agreement", "latency_us", "latency_us_p10", "latency_us_p90", "speedup"),
    *("weight_bytes", "device", "gpu"),
)
_KERNEL_FIELDS = (
    *("op", "tier", "dtype", "shape", "density", "epilogue", "us", "peer", "peer_us", "ratio", "tflops", "gbps"),
    *("ceiling_tflops", "ceiling_gbps", "gpu", "cpu"),
)
_PLACE = ("device", "gpu", "cpu", "threads", "torch", "cuda", "commit", "timer")


def html(
    rows: Sequence[Mapping[str, Any]],
    path: str | os.PathLike[str],
    *,
    kernels: Sequence[Mapping[str, Any]] = (),
    insides: Sequence[Mapping[str, Any]] = (),
    images: Sequence[str] = (),
    notes: Sequence[str] = (),
) -> Path:
    """Write the page of `rows` to `path` (a temporary file beside it, then renamed); returns the path.

    rows: of models, as from `qsparse.measure`. kernels: rows of `qsparse bench`, for the roofline and the crossover;
    those that show neither a shape nor a time are left out. insides, images: as from `inside.look`. notes: sentences
    for the end of the page.
    Raises UserError when the file cannot be written.
    """
    path = Path(path)
    drawn = [row for row in kernels if isinstance(row.get("shape"), list) and _is_number(row.get("us"))]
    data = {
        "summary": _summary(rows, drawn),
        "rows": [_chosen(row, _MODEL_FIELDS) for row in rows],
        "kernels": [_chosen(row, _KERNEL_FIELDS) for row in drawn],
        "insides": insides,
        "images": images,
        "environments": environments([*rows, *kernels]),
        "notes": notes,
    }
    from plotly.offline import get_plotlyjs

    template = resources.files("qsparse.report") / "template"
    css, js, page = ((template / name).read_text("utf-8") for name in ("page.css", "page.js", "page.html"))
    # In a script element "</" could end it, and "<!--" open a comment.
    safe = json.dumps(data, allow_nan=False, separators=(",", ":")).replace("<", "\\u003c")
    for place, text in (("css", css), ("data", safe), ("plotly", get_plotlyjs()), ("js", js)):
        page = page.replace(f"/*{{{place}}}*/", text, 1)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        temporary.write_text(page, "utf-8")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise UserError(f"Cannot write the page {path}: {error.strerror or error}.") from error
    return path


def environments(rows: Sequence[Mapping[str, Any]]) -> list[dict[str, str]]:
    """Each different place that rows were measured in: machine, versions and commit, the dates, the count of rows."""
    found: dict[tuple[Any, ...], list[str]] = {}
    for row in rows:
        found.setdefault(tuple(row.get(field) for field in _PLACE), []).append(str(row.get("date") or "-"))
    return [
        {
            **{field: str(value) for field, value in zip(_PLACE, place, strict=True) if value is not None},
            "dates": min(dates) if min(dates) == max(dates) else f"{min(dates)} to {max(dates)}",
            "rows": f"{len(dates):,}",
        }
        for place, dates in found.items()
    ]


def _summary(rows: Sequence[Mapping[str, Any]], kernels: Sequence[Mapping[str, Any]]) -> str:
    runs = len({row.get("run") for row in rows})
    said = f"{len(rows):,} rows of {runs:,} {'run' if runs == 1 else 'runs'}"
    if kernels:
        said += f", {len(kernels):,} rows of kernels"
    return f"{said}, by qsparse {__version__}. Accuracy is that of the test set, computed by what was then timed."


def _chosen(row: Mapping[str, Any], fields: tuple[str, ...]) -> dict[str, Any]:
    return {field: row[field] for field in fields if row.get(field) is not None}


def _is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
