"""Turn what `qsparse bench int8` and `qsparse bench mlp` wrote to rows.jsonl into this folder's tables and figure."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterable
from pathlib import Path

from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsparse.bench import mlp
from qsparse.bench.harness import geometric_mean
from qsparse.bench.shapes import DUEL, GPU_SHAPES, LARGEST

HERE = Path(__file__).parent
ROWS, README, FIGURE = HERE / "rows.jsonl", HERE / "README.md", HERE / "figure.png"
BEGIN, END = "<!-- tables: written by draw.py -->", "<!-- end of the tables -->"
MNIST = (60000, 1024, 784)
LAYERS = GPU_SHAPES[:8]  # that the targets are about; the smaller ones after them stand in the tables alone

# Peers of the product alone, of the product behind the quantization of float16 activations, and of float8's.
FUSED = {
    "torch._int_mm": "bare `_int_mm`",
    "torch_int8_eager": "`_int_mm`, dequantize, bias, ReLU",
    "torch_int8_compiled": "the same, compiled",
    "torch._scaled_mm": "fp8 `_scaled_mm`",
}
DYNAMIC = {
    "torch_eager_fp16": "fp16 `F.linear` + `relu`",
    "torch._addmm_activation_fp16": "fp16 `_addmm_activation`",
    "torchao": "torchao dynamic int8",
}
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#CC79A7", "#E69F00", "#56B4E9", "#999999")


def newest(rows: Iterable[dict]) -> list[dict]:
    """The last row of each measurement."""
    names = ("op", "dtype", "activations", "out_dtype", "shape", "sizes", "peer")
    return list({json.dumps([row.get(name) for name in names]): row for row in rows}.values())


class Rows:
    """The newest rows, looked up by what they measured."""

    def __init__(self, rows: Iterable[dict]):
        self.all = newest(rows)

    def of(self, op: str, **fields: object) -> list[dict]:
        return [row for row in self.all if row["op"] == op and all(row.get(k) == v for k, v in fields.items())]

    def products(self, peer: str, activations: str | None = None, op: str = "gemm_int8") -> dict[tuple, dict]:
        """float16 outputs beside a peer, by shape."""
        found = self.of(op, peer=peer, activations=activations, out_dtype="float16")
        return {tuple(row["shape"]): row for row in found}

    @property
    def cells(self) -> list[dict]:
        return mlp.cells(self.of("mlp"))


def tables(rows: list[dict]) -> str:
    """All tables, one below the other; what was not measured has none."""
    known = Rows(rows)
    parts = [*_targets(known), *_products(known), *_weight_only(known), *_quantization(known), *_networks(known)]
    last = rows[-1]
    commit = f", commit {last['commit'][:7]}" if last["commit"] else ""
    where = f"{last['gpu'] or last['cpu']}, PyTorch {last['torch']}, CUDA {last['cuda']}, {last['date'][:10]}{commit}."
    modes = sorted(
        {row["compile"] for row in known.all if "compiled" in row["peer"] or row["peer"].startswith("torchao")}
    )
    how = f" Compiled peers: `torch.compile` with mode {', '.join(map(repr, modes))}." if modes else ""
    return "\n".join([*parts, where + how])


def _targets(known: Rows) -> list[str]:
    """What was asked for beside what was reached."""
    bare = known.products("torch._int_mm")
    compiled, sgemm = known.products("torch_int8_compiled"), known.products("cublas_fp32")
    dense = {shape: row for shape, row in known.products("torch_eager_fp16", "dynamic").items() if shape[0] >= 1024}
    tops = {shape: row["tflops"] for shape, row in bare.items() if row["tflops"]}
    layers = [{shape: row for shape, row in each.items() if shape in LAYERS} for each in (bare, compiled, dense)]
    lines = [
        ("fused int8 by bare `torch._int_mm`, geometric mean of the large layers", "1.5x", _times(_mean(layers[0]))),
        ("the same, worst of them", "1.0x", _times(_worst(layers[0]))),
        ("the same, geometric mean of all shapes below", "", _times(_mean(bare))),
        *((f"fused int8 at {shape[0]}³, TOP/s", "1,250", _count(tops.get(shape))) for shape in (DUEL, LARGEST)),
        ("fused int8 by the compiled pipeline, geometric mean of the large layers", "1.8x", _times(_mean(layers[1]))),
        (f"the same at {', '.join(map(str, MNIST))}", "2.5x", _times(_ratio(compiled.get(MNIST)))),
        (
            "int8 with quantization by fp16 `F.linear` + `relu`, large layers from 1,024 rows on",
            "1.5x",
            _times(_mean(layers[2])),
        ),
        ("the same, geometric mean of all shapes from 1,024 rows on", "", _times(_mean(dense))),
        ("fused int8 by fp32 SGEMM at 4096³", "20x", _times(_ratio(sgemm.get(DUEL)))),
    ]
    for dtype, asked in (("int8wo", "1.5x"), ("int4wo", "2x")):
        found = {tuple(row["shape"]): row for row in known.of("gemm_weight_only", dtype=dtype, peer="cublas")}
        lines.append((f"{dtype} by fp16 at 16, 8192, 8192", asked, _times(_ratio(found.get((16, 8192, 8192))))))
        share = (found.get((1, 16384, 16384)) or {}).get("percent_of_ceiling")
        lines.append((f"{dtype} at 1, 16384, 16384, of the read bandwidth", "80 %", _percent(share)))
    shares = [row["ratio"] for row in known.of("quantize_rows") if tuple(row["shape"]) in ((8192, 8192), MNIST[::2])]
    lines.append(("`quantize_rows` of large tensors, of a copy's speed", "80 %", _percent(_least(shares, 100))))
    cells = known.cells
    means, large = mlp.means(cells), [c for c in cells if (c["sizes"], c["batch"]) == ([784, 4096, 4096, 10], 10_000)]
    best = [max(filter(None, cell["ratio"].values()), default=None) for cell in cells]
    lines += [
        ("whole networks by each cell's fastest peer, int8 dynamic, mean", "1.4x", _times(_of(means, "int8 dynamic"))),
        ("whole networks, int8 static, mean", "1.4x", _times(_of(means, "int8 static"))),
        ("the worst cell, by the best of ours", "1.0x", _times(_least(best))),
        *(
            (f"784-4096-4096-10 at 10,000, {name}", asked, _times(large[0]["ratio"].get(name) if large else None))
            for name, asked in (("int8 static", "1.7x"), ("int8 dynamic", "1.4x"))
        ),
    ]
    return ["| what | asked | measured |", "| --- | ---: | ---: |", *(f"| {' | '.join(line)} |" for line in lines), ""]


def _products(known: Rows) -> list[str]:
    fused = {name: known.products(peer) for peer, name in FUSED.items()}
    dynamic = {name: known.products(peer, "dynamic") for peer, name in DYNAMIC.items()}
    return [
        *_product_table("int8 product, bias, ReLU, fp16 out", fused),
        *_product_table("fp16 in, quantized, int8 product, bias, ReLU, fp16 out", dynamic),
        *_product_table(
            "fp8 product, bias, ReLU, fp16 out", {FUSED[peer]: known.products(peer, op="gemm_fp8") for peer in FUSED}
        ),
    ]


def _product_table(title: str, columns: dict[str, dict[tuple, dict]]) -> list[str]:
    """A line a shape: our time and rate, and the ratio to each peer."""
    columns = {name: members for name, members in columns.items() if members}
    if not columns:
        return []
    ours = {shape: row for members in columns.values() for shape, row in members.items()}
    lines = [
        f"| {title}: M, N, K | µs | TOP/s | {' | '.join(f'by {name}' for name in columns)} |",
        "| --- | ---: | ---: |" + " ---: |" * len(columns),
    ]
    for shape, row in ours.items():
        ratios = (_times(_ratio(members.get(shape))) for members in columns.values())
        cells = (", ".join(map(str, shape)), _us(row["us"]), _count(row["tflops"]), *ratios)
        lines.append(f"| {' | '.join(cells)} |")
    means = (f"**{_times(_mean(members))}**" for members in columns.values())
    return [*lines, f"| **geometric mean** | | | {' | '.join(means)} |", ""]


def _weight_only(known: Rows) -> list[str]:
    rows = known.of("gemm_weight_only", peer="cublas")
    if not rows:
        return []
    lines = [
        "| weight-only product: M, N, K | weights | µs | GB/s | of the read bandwidth | by fp16 cuBLAS |",
        "| --- | --- | ---: | ---: | ---: | ---: |",
    ]
    for row in rows:
        shape, share = ", ".join(map(str, row["shape"])), _percent(row["percent_of_ceiling"])
        cells = (shape, row["dtype"], _us(row["us"]), _count(row["gbps"]), share, _times(row["ratio"]))
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _quantization(known: Rows) -> list[str]:
    rows = known.of("quantize_rows")
    if not rows:
        return []
    lines = ["| `quantize_rows`: M, K | from | µs | GB/s | of a copy's speed |", "| --- | --- | ---: | ---: | ---: |"]
    for row in rows:
        share = _percent(100 * row["ratio"] if row["ratio"] else None)
        cells = (", ".join(map(str, row["shape"])), row["dtype"], _us(row["us"]), _count(row["gbps"]), share)
        lines.append(f"| {' | '.join(cells)} |")
    return [*lines, ""]


def _networks(known: Rows) -> list[str]:
    cells = known.cells
    if not cells:
        return []
    names = list(dict.fromkeys(name for cell in cells for name in cell["us"]))
    lines = [
        f"| whole network | batch | {' | '.join(names)} | fastest peer | its µs |",
        "| --- | ---: |" + " ---: |" * len(names) + " --- | ---: |",
    ]
    for cell in cells:
        ours = (f"{_us(cell['us'].get(name))} ({_times(cell['ratio'].get(name))})" for name in names)
        best = cell["best_peer"]
        what = "-".join(map(str, cell["sizes"])), f"{cell['batch']:,}"
        peer = best or "-", _us(cell["peers_us"].get(best))
        lines.append(f"| {' | '.join((*what, *ours, *peer))} |")
    means = mlp.means(cells)
    mean = (f"**{_times(means[name]['ratio'])}**" for name in names)
    return [*lines, f"| **geometric mean** | | {' | '.join(mean)} | | |", ""]


def _of(means: dict[str, dict], name: str) -> float | None:
    return means[name]["ratio"] if name in means else None


def _ratio(row: dict | None) -> float | None:
    return row["ratio"] if row else None


def _mean(rows: dict[tuple, dict]) -> float | None:
    ratios = [row["ratio"] for row in rows.values() if row["peer_us"]]  # a peer that refuses a shape has no say there
    return geometric_mean(ratios) if ratios and all(ratios) else None


def _worst(rows: dict[tuple, dict]) -> float | None:
    return _least([row["ratio"] for row in rows.values()])


def _least(values: Iterable[float | None], factor: float = 1) -> float | None:
    values = list(values)
    return factor * min(values) if values and all(values) else None


def _times(value: float | None) -> str:
    return "-" if value is None else f"{value:.2f}x"


def _percent(value: float | None) -> str:
    return "-" if value is None else f"{value:.0f} %"


def _count(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"


def _us(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}" if value >= 100 else f"{value:.1f}"


def draw(rows: list[dict]) -> None:
    """figure.png: the ratios of the products by shape, and those of the networks by cell."""
    known = Rows(rows)
    figure = Figure(figsize=(12, 5), dpi=130, layout="constrained")
    FigureCanvasAgg(figure)
    left, right = figure.subplots(1, 2)
    lines = {f"product by {name}": known.products(peer) for peer, name in FUSED.items()}
    lines |= {f"with quantization by {name}": known.products(peer, "dynamic") for peer, name in DYNAMIC.items()}
    shapes = {shape for members in lines.values() for shape in members}
    order = sorted(shapes, key=lambda shape: shape[0] * shape[1] * shape[2])
    for colour, (name, members) in zip(COLOURS, lines.items(), strict=True):
        points = [(x, _ratio(members.get(shape))) for x, shape in enumerate(order)]
        _line(left, [(x, y) for x, y in points if y], name.replace("`", ""), colour)
    _finish(left, [", ".join(map(str, shape)) for shape in order], "kernels.gemm_int8 by shape")

    cells = known.cells
    for colour, name in zip(COLOURS, dict.fromkeys(name for cell in cells for name in cell["ratio"]), strict=False):
        points = [(x, cell["ratio"].get(name)) for x, cell in enumerate(cells)]
        _line(right, [(x, y) for x, y in points if y], name, colour)
    labels = [f"{'-'.join(map(str, cell['sizes']))} at {cell['batch']:,}" for cell in cells]
    _finish(right, labels, "whole networks by the fastest peer of each cell")
    figure.suptitle(f"{rows[-1]['gpu'] or rows[-1]['cpu']}", fontsize=10)
    figure.savefig(FIGURE)


def _line(axes, points: list[tuple[int, float]], name: str, colour: str) -> None:
    if points:
        axes.plot(*zip(*points, strict=True), marker="o", markersize=4, color=colour, label=name)


def _finish(axes, labels: list[str], title: str) -> None:
    axes.axhline(1, color="black", linewidth=1)
    axes.set_xticks(range(len(labels)), labels, rotation=40, ha="right", fontsize=7)
    axes.set_yscale("log", base=2)
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}x")
    axes.set_ylabel("peer's time / ours (above 1 is faster)")
    axes.set_title(title, fontsize=10)
    axes.spines[["top", "right"]].set_visible(False)
    if axes.get_legend_handles_labels()[0]:
        axes.legend(frameon=False, fontsize=7)


def main() -> int:
    argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter).parse_args()
    if not ROWS.exists():
        print(f"Error: no {ROWS.name}; `qsparse bench int8 --out {ROWS}` on a GPU writes it", file=sys.stderr)
        return 2
    rows = [json.loads(line) for line in ROWS.read_text().splitlines()]
    head, rest = README.read_text().split(BEGIN)
    README.write_text(f"{head}{BEGIN}\n\n{tables(rows)}\n\n{END}{rest.split(END)[1]}")
    draw(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main())
