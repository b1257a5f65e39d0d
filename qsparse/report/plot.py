"""Rows -> one picture: accuracy against latency, and accuracy against bytes."""

import contextlib
import math
import os
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.lines import Line2D
from matplotlib.ticker import FixedLocator, FuncFormatter, NullFormatter, NullLocator

from qsparse.errors import UserError
from qsparse.report.rows import device_name, distinct

# Okabe & Ito, "Color Universal Design", 2008; black is the baseline's.
_COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#8C6D1F")
_MARKERS = ("o", "s", "^", "D", "v", "P", "X")
_MARKER_SIZE = 11
_CLOSE = 0.015  # of an axis: markers that near cover each other
_LEGEND_CHARACTERS = 150  # that a line of the legend holds
_LEAST_SPREAD = 0.5  # percent of accuracy: less than that on the axis would make noise look like a difference


def png(rows: list[dict[str, Any]], path: str | os.PathLike[str], *, batch: int = 1024) -> Path:
    """Draw `rows` and write them to `path` (a temporary file beside it, then renamed); returns the path.

    Left: accuracy against the latency at `batch` (logarithmic; the bar spans p10 to p90). Right: accuracy against the
    stored weight bytes (logarithmic). Library peers are hollow, the baseline is black.

    Raises:
        UserError: no row has an accuracy, or the file cannot be written.
    """
    rows = [row for row in rows if row.get("accuracy") is not None]
    if not rows:
        raise UserError(
            "There is nothing to plot: no row has an accuracy. Run `qsparse quantize` or `qsparse sparsify`."
        )
    labels = _labels(rows)
    columns = min(len(labels), max(1, _LEGEND_CHARACTERS // (max(map(len, labels)) + 7)))
    height = 5.2 + 0.25 * math.ceil(len(labels) / columns)  # inches: the panels stay as they are, the legend grows
    figure = Figure(figsize=(12, height), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2, sharey=True)
    handles = _draw(left, right, rows, str(batch))
    figure.legend(handles, labels, loc="outside lower center", ncols=columns, frameon=False, fontsize=10)
    return write(figure, path)


def require_picture(path: Path) -> None:
    """Raise UserError unless `path` is named as a picture: under another name it may be somebody's file."""
    if path.suffix.lower() != ".png" or path.is_dir():
        raise UserError(f"--out {path} is no picture: give it a name that ends in .png")


def write(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Write a PNG whole or not at all; returns the path. Raises UserError where it cannot be written."""
    path = Path(path)
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        figure.savefig(temporary, format="png")
        os.replace(temporary, path)
    except OSError as error:
        with contextlib.suppress(OSError):  # no file can have a name that is too long
            temporary.unlink(missing_ok=True)
        raise UserError(f"Cannot write the picture {path}: {error.strerror or error}.") from error
    return path


def _draw(left: Axes, right: Axes, rows: list[dict[str, Any]], batch: str) -> list[Line2D]:
    """Draw both panels; returns the legend's handles, one a row."""
    accuracies = [100 * row["accuracy"] for row in rows]
    medians, lows, highs = (
        _at_batch(rows, field, batch) for field in ("latency_us", "latency_us_p10", "latency_us_p90")
    )
    sizes = [row.get("weight_bytes") for row in rows]

    left.set_title(f"Accuracy against latency at batch {int(batch):,}", loc="left", fontsize=12)
    left.set_ylabel("accuracy on the test set (%)")
    left.set_xlabel("latency (median; bar: 10th to 90th percentile), logarithmic: left is faster")
    right.set_title("Accuracy against stored weights", loc="left", fontsize=12)
    right.set_xlabel("weight bytes, logarithmic: left is smaller")
    middle = (min(accuracies) + max(accuracies)) / 2
    spread = max(max(accuracies) - min(accuracies), _LEAST_SPREAD)
    left.set_ylim(middle - 0.65 * spread, min(middle + 0.65 * spread, 100 + 0.05 * spread))
    _log_axis(left, [us for us in (*lows, *medians, *highs) if us], _time_label)
    _log_axis(right, [size for size in sizes if size], _bytes_label)
    for axes in (left, right):
        axes.grid(True, color="#DDDDDD", linewidth=0.8)
        axes.set_axisbelow(True)
        axes.spines[["top", "right"]].set_visible(False)
        axes.tick_params(labelleft=True)

    styles = _styles(rows)
    for low, high, accuracy, style in zip(lows, highs, accuracies, styles, strict=True):
        if low and high:
            left.plot([low, high], [accuracy] * 2, color=style["color"], linewidth=1.5, alpha=0.6, zorder=2)
    _points(left, medians, accuracies, styles)
    _points(right, sizes, accuracies, styles)
    return [Line2D([], [], **style) for style in styles]


def _at_batch(rows: list[dict[str, Any]], field: str, batch: str) -> list[float | None]:
    return [(row.get(field) or {}).get(batch) for row in rows]


def _points(axes: Axes, xs: list[float | None], ys: list[float], styles: list[dict[str, Any]]) -> None:
    """A marker for each point; where others lie already, a smaller one on top, so that each is seen."""
    to_fraction = axes.transScale + axes.transLimits
    taken: list[tuple[float, float]] = []
    for x, y, style in zip(xs, ys, styles, strict=True):
        if x:
            across, up = to_fraction.transform((x, y))
            below = sum(abs(across - a) < _CLOSE and abs(up - u) < _CLOSE for a, u in taken)
            axes.plot([x], [y], **style | {"markersize": max(_MARKER_SIZE - 3 * below, 3)})
            taken.append((across, up))


def _labels(rows: list[dict[str, Any]]) -> list[str]:
    """The variants' names, with the run and the device where these differ among the rows, as matplotlib shows them."""
    several_runs = len(distinct(rows, "run")) > 1
    several_devices = len({device_name(row) for row in rows}) > 1
    labels = [
        (f"{row.get('run')}: " if several_runs else "")
        + str(row.get("variant"))
        + (f" ({device_name(row)})" if several_devices else "")
        for row in rows
    ]
    # A name is no formula, may hold what is no character, and a legend leaves out what begins with an underscore.
    labels = [label.encode(errors="replace").decode() for label in labels]
    return [("\u200b" if label.startswith("_") else "") + label.replace("$", r"\$") for label in labels]


def _styles(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Colour and marker of each row: baselines black, peers hollow, no two alike among the first seven times seven."""
    styles = []
    counts: Counter[bool] = Counter()
    for row in rows:
        is_baseline = row.get("variant") == "baseline"
        number = counts[is_baseline]
        counts[is_baseline] += 1
        colour = "black" if is_baseline else _COLOURS[number % len(_COLOURS)]
        marker = _MARKERS[(number + (0 if is_baseline else number // len(_COLOURS))) % len(_MARKERS)]
        styles.append(
            {
                "color": colour,
                "marker": marker,
                "markerfacecolor": "none" if row.get("peer") else colour,
                "markeredgecolor": colour if row.get("peer") else "white",
                "markeredgewidth": 1.8 if row.get("peer") else 0.6,
                "markersize": _MARKER_SIZE,
                "linestyle": "none",
                "zorder": 3,
                "clip_on": False,
            }
        )
    return styles


def _log_axis(axes: Axes, values: list[float], label: Callable[[float], str]) -> None:
    """A logarithmic x axis around `values` with ticks at 1, 2 and 5 times powers of ten, few enough to read."""
    if not values:
        axes.text(0.5, 0.5, "not measured", transform=axes.transAxes, ha="center", color="#666666")
        axes.set_xticks([])
        return
    low, high = min(values) / 1.4, max(values) * 1.4
    decades = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    for steps in ((1, 1.5, 2, 3, 5, 7), (1, 2, 5), (1,)):
        ticks = [step * 10.0**decade for decade in decades for step in steps]
        ticks = [tick for tick in ticks if low <= tick <= high]
        if len(ticks) <= 8:
            break
    axes.set_xscale("log")
    axes.set_xlim(low, high)
    axes.xaxis.set_major_locator(FixedLocator(ticks))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: label(value)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.xaxis.set_minor_formatter(NullFormatter())


def _time_label(microseconds: float) -> str:
    for unit, size in (("s", 1e6), ("ms", 1e3)):
        if microseconds >= size:
            return f"{microseconds / size:g} {unit}"
    return f"{microseconds:g} µs"


def _bytes_label(count: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:g} {unit}"
    return f"{count:g} B"
