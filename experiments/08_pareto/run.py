"""Accuracy against latency and bytes for everything that qsparse can do to one MLP.

    python experiments/08_pareto/run.py [--device auto|cpu|cuda] [--out DIR]

Measures the cells of sweep.toml on this device, puts their rows into rows.jsonl in place of those of the same device,
draws figure.png, and writes the tables into README.md; all three beside this file, or in DIR. Killed, it goes on where
it was. With --draw it only draws rows.jsonl again.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator
from rich.console import Console

from qsparse.report.rows import device_name, distinct
from qsparse.sweep.run import sweep

HERE = Path(__file__).parent
BEGIN, END = "<!-- tables: written by run.py -->", "<!-- end of the tables -->"
BATCH = "1024"
BELOW = 3
"""Points below the baseline that the figure still shows."""
UNSTEADY = 3
# What a row is drawn as: Okabe & Ito's colours, and a marker.
KINDS = {
    "float32": ("#000000", "o"),
    "16 bit": ("#0072B2", "s"),
    "int8": ("#D55E00", "^"),
    "fp8": ("#E69F00", "v"),
    "weights only": ("#CC79A7", "D"),
    "sparse": ("#009E73", "P"),
    "PyTorch": ("#777777", "X"),
}


def kind(row: dict[str, Any]) -> str:
    """Which of `KINDS` a row is."""
    if row["peer"]:
        return "PyTorch"
    if row["format"] != "dense":
        return "sparse"
    if row["variant"] == "baseline":
        return "float32"
    if "wo" in row["variant"]:
        return "weights only"
    return next(name for name in ("int8", "fp8", "16 bit") if name == "16 bit" or row["variant"].startswith(name))


def measured(device: str) -> list[dict[str, Any]]:
    """The rows of the sweep on `device`, the libraries' too. A cell that failed is said, and gives none."""
    done = sweep(HERE / "sweep.toml", out=f"sweeps/08_pareto-{device}", device=device, console=Console(stderr=True))
    for title, error in done.failed.items():
        print(f"failed: {title}: {error}")
    lines = (json.loads(line) for line in (done.directory / "rows.jsonl").read_text().splitlines())
    return [each for row in lines if "error" not in row for each in (row, *row.pop("peers", []))]


def merged(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """`new`, and of `old` what was measured elsewhere."""
    here = {device_name(row) for row in new}
    return [row for row in old if device_name(row) not in here] + new


def draw(rows: list[dict[str, Any]], path: Path) -> None:
    """A line of two panels a device: accuracy against speed-up at batch 1,024, and against stored bytes."""
    devices = distinct([{"name": device_name(row)} for row in rows], "name")
    figure = Figure(figsize=(12, 0.6 + 4.6 * len(devices)), dpi=150, layout="constrained")
    panels = figure.subplots(len(devices), 2, squeeze=False, sharey="row")
    for name, (left, right) in zip(devices, panels, strict=True):
        own = [row for row in rows if device_name(row) == name]
        floor = 100 * next(row["accuracy"] for row in own if row["variant"] == "baseline") - BELOW
        low = [row for row in own if 100 * row["accuracy"] < floor]
        own = [row for row in own if row not in low]
        title = f"CPU, {own[0]['cpu']}" if name == "cpu" else name
        _panel(left, own, [-row["speedup"][BATCH] for row in own], lambda x: f"{x:g}x")
        left.set(title=f"{title}: speed at batch 1,024", xlabel="speed-up over float32 timed in turn: right is faster")
        left.set_ylabel("test accuracy, %")
        _panel(right, own, [row["weight_bytes"] for row in own], lambda x: f"{x / 1e6:g} MB")
        right.set(title=f"{title}: stored weights", xlabel="bytes: left is smaller")
        if low:
            said = ", ".join(f"{row['variant']} {100 * row['accuracy']:.1f} %" for row in low)
            left.annotate(
                f"below: {said}", (0, 0), (4, 4), xycoords="axes fraction", textcoords="offset points", size=6
            )
    shown = [name for name in KINDS if any(kind(row) == name for row in rows)]
    handles = [panels[0][0].plot([], [], KINDS[name][1], color=KINDS[name][0])[0] for name in shown]
    figure.legend(handles, shown, loc="outside lower center", ncols=len(shown), frameon=False)
    figure.savefig(path)


def _panel(axes: Axes, rows: list[dict[str, Any]], costs: list[float], label: Callable[[float], str]) -> None:
    """Points of accuracy over |cost|, logarithmic, and a line through those that no other beats, with their names."""
    points = [(cost, 100 * row["accuracy"], row) for cost, row in zip(costs, rows, strict=True)]
    front = front_of([(x, y) for x, y, _ in points])
    axes.plot([abs(x) for x, _ in front], [y for _, y in front], color="#999999", linewidth=1, linestyle=":", zorder=1)
    for x, y, row in points:
        colour, marker = KINDS[kind(row)]
        axes.plot(abs(x), y, marker, color=colour, markersize=7, markeredgecolor="white", markeredgewidth=0.5)
        if (x, y) in front:
            axes.annotate(row["variant"], (abs(x), y), (2, 6), textcoords="offset points", fontsize=6, rotation=20)
    axes.set_xscale("log")
    axes.xaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda x, _: label(x)))
    axes.xaxis.set_minor_locator(NullLocator())
    axes.margins(x=0.12, y=0.15)
    axes.grid(True, color="#dddddd", linewidth=0.7)
    axes.set_axisbelow(True)
    axes.spines[["top", "right"]].set_visible(False)


def front_of(points: list[tuple[float, float]]) -> list[tuple[float, float]]:
    """Of (cost, gain) those that no other beats in both, by rising cost."""
    best: list[tuple[float, float]] = []
    for x, y in sorted(points, key=lambda point: (point[0], -point[1])):
        if not best or y > best[-1][1]:
            best.append((x, y))
    return best


def tables(rows: list[dict[str, Any]]) -> str:
    """A table for each device, by accuracy; bold is what no other row beats in accuracy and in that column."""
    parts = []
    for name in distinct([{"name": device_name(row)} for row in rows], "name"):
        own = [row for row in rows if device_name(row) == name]
        first, batches = own[0], list(own[0]["latency_us"])
        versions = f"PyTorch {first['torch']}" + (f", CUDA {first['cuda']}" if first["cuda"] else "")
        threads = f", {first['threads']} thread{'s' if first['threads'] > 1 else ''}" if name == "cpu" else ""
        lines = [
            f"**{'CPU, ' + first['cpu'] + threads if name == 'cpu' else name}** ({versions}, {first['date'][:10]})",
            "",
            "| variant | accuracy | change | " + " | ".join(f"batch {int(b):,}" for b in batches) + " | bytes |",
            "| --- | ---: | ---: |" + " ---: |" * (len(batches) + 1),
        ]
        costs = [lambda row, b=b: -row["speedup"][b] for b in batches] + [lambda row: row["weight_bytes"]]
        fronts = [set(front_of([(cost(row), row["accuracy"]) for row in own])) for cost in costs]
        for row in sorted(own, key=lambda row: -row["accuracy"]):
            texts = [f"{_time(row['latency_us'][b])} {row['speedup'][b]:.2f}x" for b in batches]
            texts.append(f"{row['weight_bytes']:,}")
            best = [(cost(row), row["accuracy"]) in front for cost, front in zip(costs, fronts, strict=True)]
            cells = " | ".join(f"**{text}**" if bold else text for text, bold in zip(texts, best, strict=True))
            accuracy = f"{100 * row['accuracy']:.2f} % | {row['accuracy_change']:+.2f}"
            lines.append(f"| {row['variant']} | {accuracy} | {cells} |")
        if unsteady := [row["variant"] for row in own if _is_unsteady(row)]:
            lines += [
                "",
                f"Unsteady, the 90th percentile over {UNSTEADY} times the 10th at some batch: {', '.join(unsteady)}.",
            ]
        parts.append("\n".join(lines))
    return "\n\n".join(parts)


def _time(us: float) -> str:
    return f"{us:.3g} µs" if us < 999.5 else f"{us / 1e3:.3g} ms" if us < 999.5e3 else f"{us / 1e6:.3g} s"


def _is_unsteady(row: dict[str, Any]) -> bool:
    return any(row["latency_us_p90"][batch] > UNSTEADY * low for batch, low in row["latency_us_p10"].items())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="auto", choices=("auto", "cpu", "cuda"))
    parser.add_argument("--out", type=Path, default=HERE)
    parser.add_argument("--draw", action="store_true")
    asked = parser.parse_args()
    asked.out.mkdir(parents=True, exist_ok=True)
    stored = HERE / "rows.jsonl"
    rows = [json.loads(line) for line in stored.read_text().splitlines()] if stored.exists() else []
    if not asked.draw:
        rows = merged(rows, measured(asked.device))
        (asked.out / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    draw(rows, asked.out / "figure.png")
    if asked.out != HERE:
        shutil.copy(HERE / "README.md", asked.out)
    readme = asked.out / "README.md"
    head, rest = readme.read_text().split(BEGIN)
    readme.write_text(f"{head}{BEGIN}\n\n{tables(rows)}\n\n{END}{rest.split(END)[1]}")


if __name__ == "__main__":
    main()
