"""Turn what `qsparse bench gemm --out rows.jsonl` and counters.py measured into this folder's tables and figure."""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsparse.bench.harness import geometric_mean

HERE = Path(__file__).parent
ROWS, README, FIGURE = HERE / "rows.jsonl", HERE / "README.md", HERE / "figure.png"
COUNTERS, UNSEEN = HERE / "counters.jsonl", HERE / "unseen.jsonl"
BEGIN, END = "<!-- tables: written by draw.py -->", "<!-- end of the tables -->"
BEGIN_UNSEEN, END_UNSEEN = "<!-- unseen: written by draw.py -->", "<!-- end of the unseen -->"
BEGIN_COUNTERS, END_COUNTERS = "<!-- counters: written by draw.py -->", "<!-- end of the counters -->"
# What is set against what: dtype, float32's precision, epilogue, and the peer that a user would call.
GROUPS = {
    "fp16": ("float16", None, "none", "cublas"),
    "bf16": ("bfloat16", None, "none", "cublas"),
    "fp16 + bias + ReLU": ("float16", None, "bias_relu", "torch_eager"),
    "bf16 + bias + ReLU": ("bfloat16", None, "bias_relu", "torch_eager"),
    "fp32 ieee": ("float32", "ieee", "none", "cublas"),
    "fp32 highest": ("float32", "highest", "none", "cublas"),
    "fp32 high": ("float32", "high", "none", "cublas_tf32"),
}
COLOURS = dict(zip(GROUPS, ("#0072B2", "#56B4E9", "#D55E00", "#E69F00", "#999999", "#009E73", "#CC79A7"), strict=True))


def grouped(rows: list[dict]) -> dict[str, dict[tuple, dict]]:
    """Rows of each group by shape."""
    found: dict[str, dict[tuple, dict]] = {name: {} for name in GROUPS}
    for row in rows:
        key = row["dtype"], row["precision"], row["epilogue"], row["peer"]
        for name, wanted in GROUPS.items():
            if key == wanted and row["layout"] == "nt" and row["tier"] != "sm80":  # sm80's are asked for by --tier
                found[name][tuple(row["shape"])] = row
    return found


def tables(rows: list[dict]) -> str:
    """Ratios by shape and group, their geometric means, and float32's errors."""
    groups = grouped(rows)
    shapes = list(dict.fromkeys(shape for members in groups.values() for shape in members))
    head = " | ".join(f"{name}, by {GROUPS[name][3]}" for name in GROUPS)
    lines = [f"| M, N, K | {head} |", "| --- |" + " ---: |" * len(GROUPS)]
    for shape in shapes:
        cells = (_cell(members.get(shape)) for members in groups.values())
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    means = (geometric_mean(row["ratio"] for row in members.values() if row["ratio"]) for members in groups.values())
    lines.append("| **geometric mean** | " + " | ".join(f"**{mean:.3f}**" for mean in means) + " |")

    lines += ["", "| fp32 at | error, ieee | highest | high | cuBLAS SGEMM |", "| --- | ---: | ---: | ---: | ---: |"]
    for shape in shapes:
        three = [groups[f"fp32 {name}"].get(shape) for name in ("ieee", "highest", "high")]
        if all(three):
            errors = [row["error"] for row in three] + [three[0]["peer_error"]]
            lines.append(f"| {', '.join(map(str, shape))} | " + " | ".join(f"{error:.1e}" for error in errors) + " |")
    lines += ["", *_epilogues(groups), *_sm80(rows), ""]
    return "\n".join([*lines, _where(rows)])


def unseen(rows: list[dict]) -> str:
    """What `unseen.py` measured: ratios by shape, and their geometric means."""
    groups = {name: members for name, members in grouped(rows).items() if members}
    lines = [f"| M, N, K | {' | '.join(f'{name}, by {GROUPS[name][3]}' for name in groups)} |"]
    lines.append("| --- |" + " ---: |" * len(groups))
    for shape in dict.fromkeys(tuple(row["shape"]) for row in rows):
        cells = (_cell(members.get(shape)) for members in groups.values())
        lines.append(f"| {', '.join(map(str, shape))} | {' | '.join(cells)} |")
    means = (geometric_mean(row["ratio"] for row in members.values() if row["ratio"]) for members in groups.values())
    lines.append("| **geometric mean** | " + " | ".join(f"**{mean:.3f}**" for mean in means) + " |")
    return "\n".join([*lines, "", _where(rows)])


def _epilogues(groups: dict[str, dict[tuple, dict]]) -> list[str]:
    """What bias and ReLU add to our plain product, in the mean over the shapes."""
    lines = []
    for dtype in ("fp16", "bf16"):
        plain, fused = groups[dtype], groups[f"{dtype} + bias + ReLU"]
        ratios = [fused[s]["us"] / plain[s]["us"] for s in plain if s in fused and fused[s]["us"] and plain[s]["us"]]
        if ratios:
            lines.append(f"Bias and ReLU add {100 * (geometric_mean(ratios) - 1):.1f} % to our {dtype} product.")
    return lines


def _sm80(rows: list[dict]) -> list[str]:
    """How near mma.sync, which older cards have, comes to cuBLAS on this one."""
    newest = {(row["dtype"], *row["shape"]): row for row in rows if row["tier"] == "sm80" and row["peer"] == "cublas"}
    return [
        f"The sm80 tier on this card, {row['dtype']} at {', '.join(map(str, row['shape']))}: {_cell(row)} of cuBLAS "
        f"(commit {row['commit'][:7]})."
        for row in newest.values()
    ]


def counters(rows: list[dict]) -> str:
    """A line a shape and library: what the GPU's counters say of the kernel."""
    head = "kernel | µs | blocks | cycles | of a multiprocessor | tensor cores | L1 | L2 | DRAM | its warps wait for"
    lines = [f"| M, N, K | {head} |", "| --- | --- |" + " ---: |" * 8 + " --- |"]
    for row in rows:
        at_work = row["sm_active_cycles"] * row["multiprocessors"] / min(row["blocks"], row["multiprocessors"])
        shares = [row[f"{part}_percent"] for part in ("tensor", "l1", "l2", "dram")]
        stalls = {name.removeprefix("stall_"): value for name, value in row.items() if name.startswith("stall_")}
        longest = sorted(stalls, key=stalls.__getitem__, reverse=True)[:3]
        cells = (
            ", ".join(map(str, row["shape"])),
            "ours" if row["ours"] else "cuBLAS",
            f"{row['us']:.1f}",
            f"{row['blocks']:.0f}" + (f" by {row['cluster']:.0f}" if row["cluster"] > 1 else ""),
            f"{row['elapsed_cycles']:,.0f}",
            f"{at_work:,.0f}",
            *(f"{share:.0f} %" for share in shares),
            ", ".join(f"{name} {stalls[name]:.1f}" for name in longest),
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join([*lines, "", _where(rows)])


def _where(rows: list[dict]) -> str:
    """The machine, and when and at which commit each dtype's newest rows were measured."""
    last = rows[-1]
    newest = {row.get("dtype"): (row["date"][:10], row["commit"]) for row in rows if row.get("tier") != "sm80"}
    runs: dict[tuple, list[str]] = {}
    for dtype, run in newest.items():
        runs.setdefault(run, []).append(dtype or "")
    parts = [
        f"{', '.join(filter(None, dtypes))} {date}".strip() + (f" at commit {commit[:7]}" if commit else "")
        for (date, commit), dtypes in runs.items()
    ]
    return f"{last['gpu']}, PyTorch {last['torch']}, CUDA {last['cuda']}; {'; '.join(parts)}."


def _cell(row: dict | None) -> str:
    if row is None:
        return "-"
    return f"{row['us']:,.0f} µs {row['ratio']:.3f}x" if row["ratio"] else "wrong"


def draw(rows: list[dict]) -> None:
    """figure.png: the ratio at every shape, a line a group."""
    groups = grouped(rows)
    shapes = sorted({shape for members in groups.values() for shape in members}, key=lambda s: s[0] * s[1] * s[2])
    figure = Figure(figsize=(10, 5), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    axes.axhline(1, color="black", linewidth=1)
    for name, members in groups.items():
        points = [(x, members[s]["ratio"]) for x, s in enumerate(shapes) if s in members and members[s]["ratio"]]
        if points:
            axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=COLOURS[name], label=name)
    axes.set_xticks(range(len(shapes)), [", ".join(map(str, s)) for s in shapes], rotation=40, ha="right", fontsize=8)
    axes.set_yscale("log")
    axes.set_yticks([0.8, 1, 1.25, 1.5, 2, 3, 4], ["0.8", "1", "1.25", "1.5", "2", "3", "4"])
    axes.minorticks_off()
    axes.set_ylabel("peer's time / ours (above 1 is faster)")
    axes.set_title(f"kernels.gemm beside the library's product, {rows[0]['gpu']}", fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, fontsize=8, ncols=4)
    figure.savefig(FIGURE)


def _write(begin: str, text: str, end: str) -> None:
    """Put a text between two marks of the README."""
    head, rest = README.read_text().split(begin)
    README.write_text(f"{head}{begin}\n\n{text}\n\n{end}{rest.split(end)[1]}")


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not ROWS.exists():
        print(f"Error: no {ROWS.name}; `qsparse bench gemm --out {ROWS}` on a GPU writes it", file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    _write(BEGIN, tables(rows), END)
    if UNSEEN.exists():
        _write(BEGIN_UNSEEN, unseen([json.loads(line) for line in UNSEEN.read_text().splitlines()]), END_UNSEEN)
    if COUNTERS.exists():
        _write(BEGIN_COUNTERS, counters([json.loads(line) for line in COUNTERS.read_text().splitlines()]), END_COUNTERS)
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
