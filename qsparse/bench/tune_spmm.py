"""Time every way of `qsparse.sparse.product` and keep the times: the only author of its table."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from qsparse.bench.harness import TOLERANCES, Call, Contender, compete, product_reference
from qsparse.bench.shapes import GPU_SPARSE, Shape
from qsparse.bench.spmm import problem
from qsparse.bench.tune import read_entries, write_entries
from qsparse.errors import UserError
from qsparse.measure import environment
from qsparse.sparse import product

DTYPES = ("float32", "float16")
DENSITIES = (0.5, 0.3, 0.1, 0.05, 0.02, 0.005)
# A layer's M, N, K: beside the benchmark's, few rows, and rows between them.
SHAPES: tuple[Shape, ...] = (
    *GPU_SPARSE,
    *((m, 4096, 4096) for m in (1, 16, 128)),
    *((m, 1024, 784) for m in (1, 16, 64)),
)
_REPETITIONS = 30
_KEY = ("gpu", "dtype", "shape", "density")


@dataclass(frozen=True)
class Tuned:
    """The entries that were found now, and the file that holds them among the older ones."""

    entries: list[dict]
    table: Path

    def to_json(self) -> dict:
        return {"entries": self.entries, "table": str(self.table)}


def tune(
    device: torch.device,
    *,
    dtypes: Iterable[str] = (),
    shapes: Iterable[Shape] = (),
    densities: Iterable[float] = (),
    table: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Time CSR, bitmap tiles, entries and dense for each dtype, shape (M, N, K) and density, and write the table.

    An entry replaces an older one of the same gpu, dtype, shape and density; the file is replaced whole after each, so
    an interrupted run keeps what it found. A way that gives a wrong product has no time. Raises UserError without a
    GPU.
    """
    if device.type != "cuda":
        raise UserError("--tune times kernels of the GPU, and this runs on the CPU: run it on the card to tune for")
    table, where = table or product.TABLE, environment(device)
    read_entries(table)  # what cannot be added to is refused before anything is measured
    cells = itertools.product(tuple(dtypes) or DTYPES, tuple(shapes) or SHAPES, tuple(densities) or DENSITIES)
    entries = []
    for dtype, shape, density in cells:
        entry = {"gpu": where["gpu"], "dtype": dtype, "shape": list(shape), "density": density}
        entry |= {"us": _times(dtype, shape, density, device)}
        entry |= {name: where[name] for name in ("date", "commit", "torch", "cuda")}
        say(f"{dtype} {','.join(map(str, shape))} density {density:g}: {entry['us']} µs")
        entries.append(entry)
        write_entries(table, [entry], _KEY)
    return Tuned(entries, table)


def _times(dtype: str, shape: Shape, density: float, device: torch.device) -> dict[str, float]:
    given = problem(shape, density, dtype, device)
    weights = product.SparseWeights.from_dense(given.w, given.w != 0)
    reference, tolerance = product_reference(given.x, given.w), TOLERANCES[dtype]
    contenders = {
        way: Contender(Call(functools.partial(_product, given.x, weights, way)), reference, tolerance)
        for way in product.WAYS
        if way not in ("bitmap", "entries") or dtype != "float32"  # which are for halves
    }
    measured, _ = compete(contenders, {}, device, _REPETITIONS, host=False)
    found = {way: each.us for way, each in measured.items() if each.us}
    if not found:
        raise UserError(f"no way computes {dtype} {','.join(map(str, shape))} at density {density:g} right")
    return found


def _product(x: torch.Tensor, weights: product.SparseWeights, way: str) -> torch.Tensor:
    return product.spmm(x, weights, way=way)[0]
