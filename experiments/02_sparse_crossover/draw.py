"""Turn what `qsparse bench spmm --out rows.jsonl` measured into this folder's tables and figure."""

from __future__ import annotations

import argparse
import json
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsparse.bench.spmm import crossovers, means

HERE = Path(__file__).parent
ROWS, README, FIGURE = HERE / "rows.jsonl", HERE / "README.md", HERE / "figure.png"
BEGIN, END = "<!-- tables: written by draw.py -->", "<!-- end of the tables -->"
NOT_YET = "Not measured yet: rows.jsonl is missing."
COLOURS = {"qsparse": "#0072B2", "qsparse, highest": "#56B4E9", "torch_csr": "#D55E00", "cublas": "#999999"}


def tables(rows: list[dict]) -> str:
    """All tables and where the rows are from."""
    where = sorted(
        {f"{row['gpu']}, PyTorch {row['torch']}, CUDA {row['cuda']}, commit {row['commit']}" for row in rows}
    )
    return "\n".join([*crossover_table(rows), "", *mean_table(rows), "", *cell_table(rows), "", *where])


def crossover_table(rows: list[dict]) -> list[str]:
    """Below which density each sparse product beats the dense one."""
    lines = ["| M, N, K | dtype | qsparse | cuSPARSE |", "| --- | --- | ---: | ---: |"]
    for entry in crossovers(rows):
        cells = (_density(entry[name]) if name in entry else "" for name in ("qsparse", "torch_csr"))
        lines.append(f"| {_sizes(entry)} | {entry['dtype']} | {' | '.join(cells)} |")
    return lines


def mean_table(rows: list[dict]) -> list[str]:
    """The peers' times over ours: the geometric mean and the worst cell of each group."""
    lines = ["| operation | dtype | plan | peer | cells | geometric mean | worst | at M, N, K, density |"]
    lines += ["| --- | --- | --- | --- | ---: | ---: | ---: | --- |"]
    for mean in means(rows):
        names = " | ".join(mean[name] for name in ("op", "dtype", "plan", "peer"))
        cells = f"{mean['cells']} | wrong | | |"
        if mean["ratio"]:
            worst = ", ".join(f"{value:g}" for value in mean["worst"])
            cells = f"{mean['cells']} | {mean['ratio']:.2f}x | {mean['worst_ratio']:.2f}x | {worst} |"
        lines.append(f"| {names} | {cells}")
    return lines


def cell_table(rows: list[dict]) -> list[str]:
    """Every cell of CSR in float32 with its plan kept: our time, and what cuSPARSE and cuBLAS take times that."""
    lines = ["`spmm_csr`, float32, plan kept:", ""]
    lines += ["| M, N, K | density | µs | by torch_csr | by cublas |", "| --- | ---: | ---: | ---: | ---: |"]
    cells: dict[tuple, dict[str, dict]] = {}
    for row in rows:
        if row["op"] == "spmm_csr" and row["dtype"] == "float32" and row["plan"] == "kept":
            cells.setdefault((_sizes(row), row["density"]), {})[row["peer"]] = row
    for (sizes, density), by_peer in cells.items():
        us = next(iter(by_peer.values()))["us"]
        ratios = (by_peer[peer]["ratio"] if peer in by_peer else None for peer in ("torch_csr", "cublas"))
        shown = " | ".join("" if ratio is None else f"{ratio:.2f}x" for ratio in ratios)
        lines.append(f"| {sizes} | {density:g} | {'wrong' if us is None else f'{us:,.1f}'} | {shown} |")
    return lines


def _sizes(row: dict) -> str:
    return ", ".join(map(str, row["shape"]))


def _density(value: float | None) -> str:
    return "all measured" if value is None else "never" if value == 0 else f"{value:.2g}"


def draw(rows: list[dict]) -> None:
    """Time against density in float32, a panel a shape."""
    rows = [row for row in rows if row["op"] == "spmm_csr" and row["dtype"] == "float32"]
    shapes = list(dict.fromkeys(tuple(row["shape"]) for row in rows))
    figure = Figure(figsize=(3.2 * len(shapes), 3.2), layout="constrained")
    FigureCanvasAgg(figure)
    for axes, shape in zip(figure.subplots(1, len(shapes), squeeze=False)[0], shapes, strict=True):
        members = [row for row in rows if tuple(row["shape"]) == shape]
        for name, colour in COLOURS.items():
            points = dict(_points(members, name))
            if points:
                times = [points[density] for density in sorted(points)]
                axes.plot(sorted(points), times, "o-", color=colour, label=name)
        axes.set(xscale="log", yscale="log", title=", ".join(map(str, shape)), xlabel="density")
    figure.axes[0].set_ylabel("µs")
    figure.axes[0].legend(frameon=False)
    figure.savefig(FIGURE, dpi=110)


def _points(rows: list[dict], name: str):
    """Density and time of one line of the figure."""
    plan = "kept, highest" if name.endswith("highest") else "kept"
    field = "us" if name.startswith("qsparse") else "peer_us"
    for row in rows:
        if row["plan"] == plan and name in ("qsparse", "qsparse, highest", row["peer"]) and row[field]:
            yield row["density"], row[field]


def main() -> None:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    text = README.read_text()
    before, after = text.split(BEGIN)[0], text.split(END)[1]
    README.write_text(f"{before}{BEGIN}\n\n{tables(rows)}\n\n{END}{after}")
    draw(rows)


if __name__ == "__main__":
    main()
