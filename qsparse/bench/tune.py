"""Time every configuration of the sm90 products at given shapes, keep the fastest, and fit what each costs elsewhere.

The only author of the tuning table, which a face reads for shapes that are in it, and of the table of costs beside it,
from which it chooses for all other shapes (`qsparse.kernels._gemm_costs`).

What a configuration is belongs to the kernels. Three names of their host modules (`MODULES`) are used:
`candidates(m, n, k, dtype, layout, device)` gives configurations that may run there, `run(config, x, w, bias, relu)`
runs one on that face's arguments, and `TABLE` is the path of the table that the face reads. m, n, k are those of the
product itself, x (m, k) and w (n, k).
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

import numpy as np
import torch

from qsparse.bench.gemm import problem
from qsparse.bench.harness import TOLERANCES, Call, Contender, compete, product_reference
from qsparse.bench.shapes import GPU_TUNED, Shape
from qsparse.errors import UserError
from qsparse.kernels._gemm_costs import Costs, terms
from qsparse.kernels._gemm_sm90_configs import label, labelled, unwalked
from qsparse.measure import environment

MODULES = {
    "float16": "_gemm_sm90",
    "bfloat16": "_gemm_sm90",
    "float32": "_gemm_sm90",  # as tf32
    "int8": "_gemm_int8_sm90",
}
DTYPES = tuple(MODULES)
_ITEM_BYTES = {"float16": (2, 2), "bfloat16": (2, 2), "float32": (4, 4), "int8": (1, 2)}  # of operands, of outputs
_CHECKED_AS = {"float32": "tf32", "int8": "bfloat16"}  # the tolerance of the outputs, where it is another dtype's
_REPETITIONS = 50
_KEY = ("gpu", "dtype", "layout", "shape")
_COSTS_KEY = ("gpu", "dtype", "layout", "config")
_ENOUGH = 2 * len(dataclasses.fields(Costs))  # shapes behind the constants of a configuration


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
    repetitions: int = _REPETITIONS,
    say: Callable[[str], None] = lambda line: None,
) -> Tuned:
    """Find the fastest correct configuration for each dtype, layout and shape (a layer's M, N, K); write the tables.

    The table is JSON, a list of entries {gpu, multiprocessors, dtype, layout, shape ([m, n, k] of the product), config,
    us, us_p10, us_p90, times (the microseconds of every right configuration by its label), wrong (how many were not),
    date, commit, torch, cuda}. An entry replaces an older one of the same gpu, dtype, layout and shape; the file is
    replaced whole after each product, so an interrupted run keeps what it found.

    The costs are fitted to all times of the table that are of this gpu, old and new, and written beside it
    (`costs_of`), a list of {gpu, dtype, layout, config (its label), costs (see `Costs`), shapes (how many), error (the
    root mean square of the relative one)}.

    Raises UserError without a GPU, or for a dtype that is not tuned.
    """
    layouts = tuple(layouts)
    dtypes = tuple(dtypes) or (DTYPES if layouts == ("nt",) else ("float16",))
    if device.type != "cuda":
        raise UserError("--tune times kernels of the GPU, and this runs on the CPU: run it on the card to tune for")
    if untuned := [dtype for dtype in dtypes if dtype not in DTYPES]:
        raise UserError(f"--tune with --dtype {untuned[0]}: only {', '.join(DTYPES)} have a table")
    for dtype in ("int8", "float32"):
        if dtype in dtypes and layouts != ("nt",):
            raise UserError(f"--tune with --dtype {dtype}: the tensor cores read {dtype} in layout nt only")
    modules = {dtype: importlib.import_module(f"qsparse.kernels.{MODULES[dtype]}") for dtype in dtypes}
    table = table or Path(modules[dtypes[0]].TABLE)
    read_entries(table)  # what cannot be added to is refused before anything is measured
    where = environment(device)
    entries = []
    for dtype in dtypes:
        for layout in layouts:
            for shape in tuple(shapes) or GPU_TUNED:
                if not _aligned(shape, dtype, layout):
                    say(
                        f"{dtype} {layout} {list(shape)}: left out, for rows off 16-byte boundaries have another kernel"
                    )
                    continue
                entry = _fastest(modules[dtype], shape, dtype, layout, device, where, repetitions)
                best = f"{entry['us']} µs by {entry['config']}, {len(entry['times'])} right"
                say(f"{dtype} {layout} {entry['shape']}: {best}")
                entries.append(entry)
                write_entries(table, [entry])
    if not entries:
        raise UserError("no shape was measured, so the table stays as it is: rows of each are off 16-byte boundaries")
    measured = [each for each in read_entries(table) if each["gpu"] == where["gpu"]]
    write_entries(costs_of(table), fit(measured), _COSTS_KEY)
    return Tuned(entries, table)


def costs_of(table: Path) -> Path:
    """The file of costs that belongs to a table."""
    return table.with_name(f"{table.stem}_costs{table.suffix}")


def fit(entries: list[dict]) -> list[dict]:
    """The costs of each configuration that was timed at shapes enough, by gpu, dtype and layout of a table's entries.

    They are the constants, none below 0, with the least sum of squared relative errors.
    """
    from scipy.optimize import nnls

    points: dict = {}
    for entry in entries:
        (m, n, k), (item_bytes, out_bytes) = entry["shape"], _ITEM_BYTES[entry["dtype"]]
        best: dict = {}
        for text, us in entry.get("times", {}).items():  # an entry of older times has none
            config = unwalked(labelled(text))
            best[config] = min(us, best.get(config, us))
        for config, us in best.items():
            counts = terms(config, m, n, k * item_bytes, out_bytes, entry["multiprocessors"])
            rows = points.setdefault((entry["gpu"], entry["dtype"], entry["layout"], label(config)), [])
            rows.append([count / us for count in counts])
    found = []
    for key, rows in points.items():
        if len(rows) >= _ENOUGH:
            constants, residual = nnls(np.array(rows), np.ones(len(rows)))
            costs = dataclasses.asdict(Costs(*(round(float(constant), 4) for constant in constants)))
            error = round(float(residual) / len(rows) ** 0.5, 4)
            found.append(
                dict(zip(_COSTS_KEY, key, strict=True)) | {"costs": costs, "shapes": len(rows), "error": error}
            )
    return found


def _aligned(shape: Shape, dtype: str, layout: str) -> bool:
    """Whether all rows of both operands, in memory, start on 16-byte boundaries."""
    _, n, k = shape
    return all(width * _ITEM_BYTES[dtype][0] % 16 == 0 for width in ((k,) if layout == "nt" else (n, k)))


def _fastest(
    face: ModuleType, shape: Shape, dtype: str, layout: str, device: torch.device, where: dict, repetitions: int
) -> dict:
    given = problem(shape, dtype, layout, device)
    a, b = (_int8(a) if dtype == "int8" else a for a in (given.a, given.b))
    (m, k), n = a.shape, b.shape[0]
    configs = {label(config): config for config in face.candidates(m, n, k, a.dtype, layout, device)}
    reference = product_reference(a, b)
    tolerance = TOLERANCES[_CHECKED_AS.get(dtype, dtype)]
    contenders = {
        name: Contender(Call(functools.partial(face.run, config, a, b, None, False)), reference, tolerance)
        for name, config in configs.items()
    }
    measured, _ = compete(contenders, {}, device, repetitions, host=False)
    right = {name: measurement for name, measurement in measured.items() if measurement.us}
    if not right:
        raise UserError(f"none of {len(configs)} configurations computes {dtype} {layout} {m},{n},{k} right")
    winner = min(right, key=lambda name: right[name].us)
    best = right[winner]
    on_gpu = device.type == "cuda"
    return {
        "gpu": where["gpu"],
        "multiprocessors": torch.cuda.get_device_properties(device).multi_processor_count if on_gpu else 1,
        "dtype": dtype,
        "layout": layout,
        "shape": [m, n, k],
        "config": dataclasses.asdict(configs[winner]),
        "us": best.us,
        "us_p10": best.us_p10,
        "us_p90": best.us_p90,
        "times": {name: measurement.us for name, measurement in right.items()},
        "wrong": len(configs) - len(right),
        **{name: where[name] for name in ("date", "commit", "torch", "cuda")},
    }


def _int8(values: torch.Tensor) -> torch.Tensor:
    """Normal random numbers as int8, at four standard deviations the largest."""
    return (values * 32).round_().clamp_(-127, 127).to(torch.int8)


def read_entries(table: Path) -> list[dict]:
    """A table's entries, none of a file that is not there. Raises UserError for a file of something else."""
    try:
        entries = json.loads(table.read_text()) if table.exists() else []
    except ValueError:
        entries = None
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        raise UserError(f"{table} is no tuning table, a JSON list of entries: name another file, or none")
    return entries


def write_entries(table: Path, entries: list[dict], key: tuple[str, ...] = _KEY) -> None:
    """Put entries into a table, one a line so that a change of one shows as one; the same `key` is replaced."""
    older = read_entries(table)
    merged = {json.dumps([entry[name] for name in key]): entry for entry in (*older, *entries)}
    lines = ",\n".join(json.dumps(entry, allow_nan=False) for entry in merged.values())
    temporary = table.with_suffix(".tmp")
    temporary.write_text(f"[\n{lines}\n]\n")
    os.replace(temporary, table)
