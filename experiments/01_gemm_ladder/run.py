"""Climb the ladder: compile, check and time every rung beside cuBLAS; write rows.jsonl, figure.png and README's table.

    python experiments/01_gemm_ladder/run.py           # on a GPU, about a minute
    python experiments/01_gemm_ladder/run.py --draw    # the figure and the table again, from the rows that there are

Exits with 1 when a rung computes something else than the float64 reference; such a rung has no time.
"""

from __future__ import annotations

import argparse
import functools
import json
import sys
from dataclasses import dataclass
from pathlib import Path

import torch
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure

from qsparse import kernels
from qsparse.bench.gemm import Problem, problem
from qsparse.bench.harness import TOLERANCES, Call, Contender, compete, product_reference, row
from qsparse.bench.peers import pytorch
from qsparse.device import resolve_device
from qsparse.errors import UserError
from qsparse.kernels import _load
from qsparse.measure import environment

HERE = Path(__file__).resolve().parent
ROWS, FIGURE, README = HERE / "rows.jsonl", HERE / "figure.png", HERE / "README.md"
SIZES = (1024, 4096)  # M = N = K; the table shows the largest
BEGIN, END = "<!-- table: written by run.py -->", "<!-- end of the table -->"


@dataclass(frozen=True)
class Rung:
    """One file of the ladder, `NN_name.cu` with the kernel `name`, and how to launch it.

    `tile` is the outputs of a block (M, N) and the slice of K; sizes must be multiples of it. `maps` gives the kernel
    tensor maps of x and w, with boxes of a tile, where the others get pointers.
    """

    stem: str
    idea: str
    dtype: str
    tile: tuple[int, int, int]
    threads: int
    tier: str = "simt"
    shared: int = 0
    maps: bool = False

    @property
    def source(self) -> Path:
        return HERE / f"{self.stem}.cu"

    @property
    def kernel(self) -> str:
        return self.stem.partition("_")[2]

    def __call__(self, x: torch.Tensor, w: torch.Tensor) -> torch.Tensor:
        """`x (M, K) @ w (N, K).T`, both contiguous on a GPU, of the rung's dtype and in multiples of its tile."""
        (m, k), n = x.shape, w.shape[0]
        bm, bn, bk = self.tile
        assert m % bm == n % bn == k % bk == 0, f"{self.stem} does multiples of {self.tile}, not {(m, n, k)}"
        y = torch.empty((m, n), dtype=x.dtype, device=x.device)
        if self.maps:
            box = functools.partial(_load.tensor_map, dtype=x.dtype, columns=k, stride=k)
            operands = box(x.data_ptr(), rows=m, box=(bm, bk)), box(w.data_ptr(), rows=n, box=(bn, bk))
            formats = "128s128sPiii"
        else:
            operands, formats = (x.data_ptr(), w.data_ptr()), "PPPiii"
        _load.launch(
            x.device,
            str(self.source),
            self.kernel,
            formats,
            (*operands, y.data_ptr(), m, n, k),
            grid=m // bm * (n // bn),
            block=self.threads,
            shared=self.shared,
        )
        return y


RUNGS = (
    Rung("01_naive", "A thread an output, straight from global memory.", "float32", (8, 32, 1), 256),
    Rung("02_coalesced", "The lanes of a warp read neighbours: one line a load.", "float32", (4, 8, 32), 1024),
    Rung("03_shared_tiles", "A block fetches a tile once for all its threads.", "float32", (32, 32, 32), 1024),
    Rung("04_register_tiles", "A thread computes 8 x 8 outputs from 16 numbers.", "float32", (128, 128, 8), 256),
    Rung("05_vectorised", "16 bytes an access; the next tile loads meanwhile.", "float32", (128, 128, 8), 256),
    Rung(
        "06_tensor_cores", "Half precision: a warp multiplies whole matrices.", "float16", (128, 128, 32), 256, "sm80"
    ),
    Rung(
        "07_async_copies",
        "Copies bypass the registers, three tiles ahead.",
        "float16",
        (128, 128, 32),
        256,
        "sm80",
        shared=81920,
    ),
    Rung(
        "08_tma_wgmma",
        "One thread starts copies and products of whole tiles.",
        "float16",
        (128, 256, 64),
        256,
        "sm90",
        shared=197632,
        maps=True,
    ),
)
SUMMIT = "kernels.gemm"
SUMMIT_IDEA = "The library's kernel: any shape, persistent blocks, roles for warps."


def climb(device: torch.device) -> list[dict]:
    """A row for every rung that this card has, at every size, each timed in turn with cuBLAS."""
    where = environment(device)
    runnable = [rung for rung in RUNGS if _runs_on(rung, device)]
    rows = []
    for size in SIZES:
        for rung in runnable:
            rows.append(_row(rung.stem, rung.tier, rung, _problem(size, rung.dtype, device), where))
        rows.append(_row(SUMMIT, None, kernels.gemm, _problem(size, "float16", device), where))
    return rows


def _runs_on(rung: Rung, device: torch.device) -> bool:
    major, _ = torch.cuda.get_device_capability(device)
    return {"simt": True, "sm80": major >= 8, "sm90": major == 9}[rung.tier]


def _problem(size: int, dtype: str, device: torch.device) -> Problem:
    return problem((size, size, size), dtype, "nt", device)


def _row(name: str, tier: str | None, kernel, given: Problem, environment: dict) -> dict:
    print(f"{name} {given.shape[0]}", file=sys.stderr, flush=True)
    reference, tolerance = product_reference(given.a, given.b), TOLERANCES[given.dtype]
    ours = {name: Contender(Call(functools.partial(kernel, given.a, given.b)), reference, tolerance)}
    theirs = {"cublas": Contender(pytorch.products(given.a, given.b)["cublas"], reference, tolerance)}
    measured, telemetry = compete(ours, theirs, given.a.device)
    return row(
        op="gemm",
        tier=tier,
        dtype=given.dtype,
        shape=given.shape,
        kernel=measured[name],
        peer="cublas",
        against=measured["cublas"],
        flop=given.flop,
        nbytes=given.nbytes("none"),
        environment=environment,
        rung=name,
        layout="nt",
        epilogue="none",
        **telemetry,
    )


def table(rows: list[dict]) -> str:
    """The README's table: every rung at the largest size, and what it gained over the one before."""
    by_rung = {each["rung"]: each for each in rows if each["shape"][0] == max(SIZES)}
    steps = [(rung.stem, f"[{rung.stem}]({rung.source.name})", rung.idea, rung.dtype) for rung in RUNGS]
    lines = [
        f"| rung | the one new idea | inputs | µs at {max(SIZES)}³ | TFLOP/s | gained | of cuBLAS |",
        "| --- | --- | --- | ---: | ---: | ---: | ---: |",
    ]
    before = None
    for name, link, idea, dtype in (*steps, (SUMMIT, f"`{SUMMIT}`", SUMMIT_IDEA, "float16")):
        each = by_rung.get(name, {})
        us, ratio = each.get("us"), each.get("ratio")
        cells = [link, idea, dtype, f"{us:,.0f}" if us else "-"]
        cells += [f"{each['tflops']:.3g}" if us else "-", f"{before / us:.2f}x" if us and before else "-"]
        cells.append(f"{100 * ratio:.0f} %" if ratio else "-")
        lines.append(f"| {' | '.join(cells)} |")
        before = us
    return "\n".join((*lines, "", _caption(by_rung.get(RUNGS[0].stem))))


def _caption(first: dict | None) -> str:
    if first is None:
        return "Not measured yet: `python experiments/01_gemm_ladder/run.py` fills this in."
    return (
        f"{first['gpu']}, PyTorch {first['torch']}, CUDA {first['cuda']}, {first['date'][:10]}. Median of CUDA-graph "
        "replays, L2 cache flushed before each, in turn with cuBLAS on the same inputs (float32: SGEMM without tf32)."
    )


def draw(rows: list[dict]) -> None:
    """figure.png: the TFLOP/s of every rung at the largest size, and where cuBLAS stands."""
    rows = [each for each in rows if each["shape"][0] == max(SIZES) and each["us"]]
    colours = {"float32": "#0072B2", "float16": "#D55E00"}
    figure = Figure(figsize=(9, 4.2), dpi=150, layout="constrained")
    FigureCanvasAgg(figure)
    axes = figure.subplots()
    for place, each in enumerate(rows):
        axes.barh(place, each["tflops"], color=colours[each["dtype"]])
        axes.text(each["tflops"], place, f"{each['tflops']:.3g} ", va="center", ha="right", color="white", fontsize=9)
    for dtype, colour in colours.items():
        theirs = [each["tflops"] / each["ratio"] for each in rows if each["dtype"] == dtype and each["ratio"]]
        if theirs:
            axes.axvline(max(theirs), color=colour, linestyle="--", linewidth=1, label=f"cuBLAS {dtype}")
    axes.set_yticks(range(len(rows)), [each["rung"] for each in rows], fontsize=9)
    axes.invert_yaxis()
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:g}")
    axes.set_xlabel(f"TFLOP/s at {max(SIZES)}³ (logarithmic), {rows[0]['gpu']}")
    axes.margins(x=0.15)
    axes.spines[["top", "right"]].set_visible(False)
    axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=2)
    figure.savefig(FIGURE)


def publish(rows: list[dict]) -> None:
    """Write the table into the README, and the figure where there are rows."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    tail = rest.split(END)[1]
    README.write_text(f"{head}{BEGIN}\n\n{table(rows)}\n\n{END}{tail}")
    if rows:
        draw(rows)


def read_rows() -> list[dict]:
    return [json.loads(line) for line in ROWS.read_text().splitlines()] if ROWS.exists() else []


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--draw", action="store_true", help="only the figure and the table, from rows.jsonl")
    if parser.parse_args().draw:
        publish(read_rows())
        return 0
    try:
        device = resolve_device("cuda")
    except UserError as error:
        print(f"Error: {error}", file=sys.stderr)
        return 2
    rows = climb(device)
    ROWS.write_text("".join(json.dumps(each, allow_nan=False) + "\n" for each in rows))
    publish(rows)
    print(table(rows))
    wrong = [each for each in rows if not each["correct"]]
    for each in wrong:
        print(f"WRONG: {each['rung']} at {each['shape']}, error {each['error']}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
