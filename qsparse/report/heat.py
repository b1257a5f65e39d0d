"""The rows of `qsparse sensitivity` -> a heat map: which layer bears what."""

import os
from pathlib import Path
from typing import Any

import numpy as np
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.colors import LinearSegmentedColormap, SymLogNorm
from matplotlib.figure import Figure

from qsparse.report.plot import write

_COLOURS = LinearSegmentedColormap.from_list("change", ["#D55E00", "#F6E3D3", "#FFFFFF", "#D6E6F2", "#0072B2"])
_LINEAR = 0.1  # points: what is smaller is mostly noise, and nearly white
_LEAST_SPAN = 1.0  # points of the scale, so that noise alone has no strong colour


def heat_map(rows: list[dict[str, Any]], path: str | os.PathLike[str]) -> Path:
    """Draw the change of the accuracy of each layer (down) in each choice (across), with its bytes; returns `path`.

    rows: of `sensitivity`. Orange loses, blue gains, on a scale that is linear up to 0.1 points and logarithmic beyond.
    Raises UserError where the file cannot be written.
    """
    layers, choices = (list(dict.fromkeys(row[field] for row in rows)) for field in ("layer", "choice"))
    changes = np.zeros((len(layers), len(choices)))
    figure = Figure(figsize=(2.6 + 1.25 * len(choices), 1.9 + 0.62 * len(layers)), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for row in rows:
        changes[layers.index(row["layer"]), choices.index(row["choice"])] = row["accuracy_change"]
    span = max(_LEAST_SPAN, np.abs(changes).max())
    norm = SymLogNorm(_LINEAR, vmin=-span, vmax=span)
    image = axes.imshow(changes, cmap=_COLOURS, norm=norm, aspect="auto")
    simulated = set()
    for row in rows:
        place = choices.index(row["choice"]), layers.index(row["layer"])
        change, size = row["accuracy_change"], row["bytes"]
        simulated |= {row["choice"]} if row["simulated"] else set()
        text = (f"{change:+.2f}" if round(change, 2) else "0.00") + ("" if size is None else f"\n{size:,} B")
        axes.text(
            *place, text, ha="center", va="center", fontsize=9, color="white" if _is_dark(norm(change)) else "black"
        )
    labels = [f"{choice}\nsimulated" if choice in simulated else choice for choice in choices]
    axes.set_xticks(range(len(choices)), labels)
    axes.set_yticks(range(len(layers)), layers)
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)
    axes.set_title(
        f"Accuracy on {rows[0]['images']:,} validation images,\neach layer compressed alone: change in points",
        loc="left",
        fontsize=11,
    )
    figure.colorbar(image, ax=axes, label="points", ticks=[-span, -_LINEAR, 0, _LINEAR, span], format="{x:+.3g}")
    return write(figure, path)


def _is_dark(place: float) -> bool:
    """Whether white is read more easily than black on the colour at this place of the scale."""
    red, green, blue, _ = _COLOURS(place)
    return 0.299 * red + 0.587 * green + 0.114 * blue < 0.55
