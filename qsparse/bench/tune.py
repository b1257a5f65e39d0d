"""Time every configuration of the sm90 products at given shapes and keep the fastest: the tuning table's only author.

What a configuration is belongs to the kernels. Three names of their host modules (`MODULES`) are used:
`candidates(m, n, k, dtype, layout, device)` gives hashable configurations (frozen dataclasses) that may run there,
`run(config, x, w, bias, relu)` runs one on that face's arguments, and `TABLE` is the path of the table that the face
reads. m, n, k are those of the product itself, x (m, k) and w (n, k).
"""

from __future__ import annotations

import dataclasses
import functools
import importlib
import json
import os
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType

import torch

from qsparse.bench.gemm import problem
from qsparse.bench.harness import TOLERANCES, Call, Contender, compete, product_reference
from qsparse.bench.shapes import GPU_TUNED, Shape
from qsparse.errors import UserError
from qsparse.measure import environment

MODULES = {"float16": "_gemm_sm90", "bfloat16": "_gemm_sm90", "int8": "_gemm_int8_sm90"}
DTYPES = tuple(MODULES)
_REPETITIONS = 50
_KEY = ("gpu", "dtype", "layout", "shape")


@dataclasses.dataclass(frozen=True)
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
    layouts: Iterable[str] = ("nt",),
    table: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Find the fastest correct configuration for each dtype, layout and shape (a layer's M, N, K), and write the table.

    The table is JSON, a list of entries {gpu, dtype, layout, shape ([m, n, k] of the product), config, us, us_p10,
    us_p90, tried, wrong, date, commit, torch, cuda}. An entry replaces an older one of the same gpu, dtype, layout and
    shape; the file is replaced whole after each product, so an interrupted run keeps what it found.

    Raises UserError without a GPU, or for a dtype that is not tuned.
    """
    dtypes, layouts = tuple(dtypes) or DTYPES, tuple(layouts)
    if device.type != "cuda":
        raise UserError("--tune times kernels of the GPU, and this runs on the CPU: run it on the card to tune for")
    if untuned := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UserError(f"--tune with --dtype {untuned[0]}: only {', '.join(DTYPES)} have a table")
    if "int8" in dtypes and layouts != ("nt",):
        raise UserError("--tune with --dtype int8: the tensor cores read int8 in layout nt only")
    modules = {dtype: importlib.import_module(f"qsparse.kernels.{MODULES[dtype]}") for dtype in dtypes}
    table = table or Path(modules[dtypes[0]].TABLE)
    where = environment(device)
    entries = []
    for dtype in dtypes:
        for layout in layouts:
            for shape in tuple(shapes) or GPU_TUNED:
                entry = _fastest(modules[dtype], shape, dtype, layout, device, where)
                say(f"{dtype} {layout} {entry['shape']}: {entry['us']} µs by {entry['config']}, {entry['tried']} tried")
                entries.append(entry)
                write_entries(table, [entry])
    return Tuned(entries, table)


def _fastest(face: ModuleType, shape: Shape, dtype: str, layout: str, device: torch.device, where: dict) -> dict:
    given = problem(shape, dtype, layout, device)
    a, b = (_int8(a) if dtype == "int8" else a for a in (given.a, given.b))
    (m, k), n = a.shape, b.shape[0]
    configs = list(face.candidates(m, n, k, a.dtype, layout, device))
    reference = product_reference(a, b)
    tolerance = TOLERANCES["bfloat16" if dtype == "int8" else dtype]  # of the outputs
    contenders = {
        str(number): Contender(Call(functools.partial(face.run, config, a, b, None, False)), reference, tolerance)
        for number, config in enumerate(configs)
    }
    measured, _ = compete(contenders, {}, device, _REPETITIONS, host=False)
    right = {number: measurement for number, measurement in measured.items() if measurement.us}
    if not right:
        raise UserError(f"none of {len(configs)} configurations computes {dtype} {layout} {m},{n},{k} right")
    winner = min(right, key=lambda number: right[number].us)
    best = right[winner]
    return {
        "gpu": where["gpu"],
        "dtype": dtype,
        "layout": layout,
        "shape": [m, n, k],
        "config": dataclasses.asdict(configs[int(winner)]),
        "us": best.us,
        "us_p10": best.us_p10,
        "us_p90": best.us_p90,
        "tried": len(configs),
        "wrong": len(configs) - len(right),
        **{name: where[name] for name in ("date", "commit", "torch", "cuda")},
    }


def _int8(values: torch.Tensor) -> torch.Tensor:
    """Normal random numbers as int8, at four standard deviations the largest."""
    return (values * 32).round_().clamp_(-127, 127).to(torch.int8)


def write_entries(table: Path, entries: list[dict], key: tuple[str, ...] = _KEY) -> None:
    """Put entries into a table, one a line so that a change of one shows as one; the same `key` is replaced."""
    older = json.loads(table.read_text()) if table.exists() else []
    merged = {json.dumps([entry[name] for name in key]): entry for entry in (*older, *entries)}
    lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in merged.values())
    temporary = table.with_suffix(".tmp")
    temporary.write_text(f"[\n{lines}\n]\n")
    os.replace(temporary, table)
