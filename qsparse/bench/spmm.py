"""Sparse weights: our products against cuSPARSE's, and both against the dense product that pruning has to beat.

A shape is that of the layer, M, N, K = batch rows, outputs, inputs; W (N, K) has random entries of a density, x and
the values are normal. `op` is `spmm_csr`, `spmm_coo` (entries sorted by row, the peer's too), `spmm_csr_transposed`
(dy @ W, the input's gradient), `sddmm` (dy.T @ x at W's entries, the weights' gradient), `spmm_bitmap` or
`spmm_entries` (16-bit), the last three on a GPU. A field `plan` says whether what a kernel finds out about W's pattern
was `kept` from before, as in a layer, or found out in the call (`each call`); `kept, highest` is float32 on the tensor
cores. `gemm_24` and `gemm_int8_24` are in two_four.py.

The crossover is the density below which the sparse product is faster than cuBLAS's dense one of the same dtype.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.bench import two_four
from qsparse.bench.harness import (
    REPETITIONS,
    TOLERANCES,
    Call,
    Contender,
    Error,
    Reference,
    append,
    compete,
    geometric_mean,
    product_reference,
    row,
    willing,
)
from qsparse.bench.peers import pytorch, sparse
from qsparse.bench.shapes import CPU_SPARSE, GPU_SHAPES, GPU_SPARSE, Shape
from qsparse.errors import UserError
from qsparse.measure import environment
from qsparse.sparse import to_csr
from qsparse.sparse.bitmap_tiles import to_bitmap_tiles
from qsparse.sparse.entry_tiles import to_entry_tiles

OPS = ("spmm_csr", "spmm_coo", "spmm_csr_transposed", "spmm_bitmap", "spmm_entries", "sddmm")
CPU_OPS = OPS[:3]
DTYPES = ("float32", "float16", "bfloat16")
DENSITIES = (0.3, 0.1, 0.05, 0.02)
GROUP = ("op", "dtype", "plan", "peer")
_DENSE = ("cublas", "torch_fp32")
_TILES = {
    "spmm_bitmap": (to_bitmap_tiles, kernels.spmm_bitmap),
    "spmm_entries": (to_entry_tiles, kernels.spmm_entries),
}


@dataclass(frozen=True)
class Problem:
    """A layer's W, dense and in CSR, its transpose in CSR, and its input and output gradient."""

    shape: Shape
    density: float
    x: Tensor
    dy: Tensor
    w: Tensor

    @functools.cached_property
    def csr(self) -> sparse.Csr:
        return to_csr(self.w, self.w != 0)

    @functools.cached_property
    def transposed(self) -> sparse.Csr:
        wt = self.w.t().contiguous()
        return to_csr(wt, wt != 0)

    @functools.cached_property
    def rows(self) -> Tensor:
        lengths = self.csr[2].diff()
        return torch.repeat_interleave(torch.arange(len(lengths), device=lengths.device), lengths).int()

    @property
    def nnz(self) -> int:
        return self.csr[0].numel()


def problem(shape: Shape, density: float, dtype: str, device: torch.device) -> Problem:
    """The same in every run."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)

    def draw(*size: int) -> Tensor:
        return torch.randn(size, generator=generator, device=device).to(getattr(torch, dtype))

    x, dy = draw(m, k), draw(m, n)
    kept = torch.rand((n, k), generator=generator, device=device) < density
    return Problem(shape, density, x, dy, draw(n, k).masked_fill_(~kept, 0))


@dataclass(frozen=True)
class _Sampled(Reference):
    """A reference of one dimension: the gradient of the values."""

    def error(self, output: Tensor) -> Error:
        return super().error(output.reshape(1, -1))


@dataclass(frozen=True)
class Contest:
    """One operation on one problem: our calls by what they do with the plan, the peers' calls, and what is right."""

    op: str
    ours: dict[str, Call]
    theirs: dict[str, Call]
    reference: Reference
    nbytes: int


def _contest(op: str, given: Problem) -> Contest:
    _, n, k = given.shape
    on_gpu, size = given.x.is_cuda, given.x.element_size()
    entries = given.nnz * (size + 4) + 4 * (n + 1)
    unchecked = {"check": False}
    if op == "sddmm":
        _, cols, offsets = given.csr
        plan = kernels.spmm_csr.plan(cols, offsets, shape=(n, k))
        ours = {"kept": Call(lambda: kernels.sddmm(given.dy, given.x, cols, offsets, plan=plan, **unchecked))}
        values = (given.dy.double().t() @ given.x.double())[given.rows.long(), cols.long()]
        moved = (given.x.numel() + given.dy.numel() + given.nnz) * size + 4 * given.nnz
        theirs = sparse.sampled_products(given.dy, given.x, given.csr, (n, k))
        return Contest(op, ours, theirs, _Sampled(values.reshape(1, -1)), moved)
    a, w, csr, shape = given.x, given.w, given.csr, (n, k)
    if op == "spmm_csr_transposed":
        a, w, csr, shape = given.dy, given.w.t(), given.transposed, (k, n)
    values, cols, offsets = csr
    moved = entries + (a.shape[0] * sum(shape)) * size
    reference = product_reference(a, w)
    if not on_gpu:
        ours = {"each call": Call(lambda: _cpu_product(op, a, csr, given.rows, shape))}
        return Contest(op, ours, pytorch.cpu_products(a, w), reference, moved)
    if op == "spmm_coo":
        options = {"shape": shape, "ordered": True, **unchecked}
        ours = {"each call": Call(lambda: kernels.spmm_coo(a, values, given.rows, cols, **options))}
        return Contest(op, ours, sparse.coo_products(a, csr, given.rows, shape), reference, moved + 4 * given.nnz)
    if op in _TILES:
        pack, face = _TILES[op]
        tiles = pack(w, w != 0)
        ours = {"each call": Call(functools.partial(face, a, *tiles, shape=shape, **unchecked))}
        moved += sum(part.numel() * part.element_size() for part in tiles) - entries
        return Contest(op, ours, sparse.products(a, csr, shape) | sparse.dense_products(a, w), reference, moved)
    plan = kernels.spmm_csr.plan(cols, offsets, shape=shape)
    product = functools.partial(kernels.spmm_csr, a, *csr, shape=shape, **unchecked)
    ours = {"kept": Call(functools.partial(product, plan=plan)), "each call": Call(product)}
    if a.dtype == torch.float32 and op == "spmm_csr":
        ours["kept, highest"] = Call(functools.partial(product, plan=plan, precision="highest"))
    return Contest(op, ours, sparse.products(a, csr, shape) | sparse.dense_products(a, w), reference, moved)


def _cpu_product(op: str, a: Tensor, csr: sparse.Csr, rows: Tensor, shape: tuple[int, int]) -> Tensor:
    values, cols, offsets = csr
    if op == "spmm_coo":
        return kernels.spmm_coo(a, values, rows, cols, shape=shape, check=False, ordered=True)
    return kernels.spmm_csr(a, values, cols, offsets, shape=shape, check=False)


def measure(
    given: Problem,
    op: str,
    dtype: str,
    environment: dict,
    repetitions: int = REPETITIONS,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Check and time an operation and its peers in one interleaved run; a row for each of our ways and each peer."""
    contest = _contest(op, given)
    tolerance = TOLERANCES[dtype]
    ours = {plan: Contender(call, contest.reference, tolerance) for plan, call in contest.ours.items()}
    theirs = {}
    for peer, call in contest.theirs.items():
        # In float16 x and W are rounded to 11 bits, and cuSPARSE rounds more than the sums: rows say what its error is.
        loose = TOLERANCES["tf32"] if "float16" in (dtype, peer.removeprefix("cublas_")) else tolerance
        theirs |= willing({peer: call}, contest.reference, loose, say)
    measured, telemetry = compete(ours, theirs, given.x.device, repetitions)
    return [
        row(
            op=op,
            dtype=dtype,
            shape=given.shape,
            density=given.density,
            kernel=measured[plan],
            peer=peer,
            against=measured[peer],
            flop=2 * given.nnz * given.shape[0],
            nbytes=contest.nbytes,
            environment=environment,
            nnz=given.nnz,
            plan=plan,
            **telemetry,
        )
        for plan, peer in itertools.product(ours, theirs)
    ]


def means(rows: Iterable[dict]) -> list[dict]:
    """The geometric mean and the worst ratio of each group, over all shapes and densities; null with a wrong kernel."""
    groups: dict[tuple, list[dict]] = {}
    for each in rows:
        groups.setdefault(tuple(each[name] for name in GROUP), []).append(each)
    found = []
    for key, members in groups.items():
        ratios = [each["ratio"] for each in members]
        whole = all(ratios)
        worst = min(members, key=lambda each: each["ratio"]) if whole else None
        found.append(
            dict(zip(GROUP, key, strict=True))
            | {
                "cells": len(members),
                "ratio": round(geometric_mean(ratios), 4) if whole else None,
                "worst_ratio": worst and worst["ratio"],
                "worst": worst and [*worst["shape"], worst["density"]],
            }
        )
    return found


def crossovers(rows: Iterable[dict]) -> list[dict]:
    """Below which density `spmm_csr`, ours and PyTorch's, beats the dense product: one entry a dtype and shape.

    Between two measured densities the times are taken as straight lines on a double logarithmic scale. 0 stands for
    never, None for a density above all measured ones.
    """
    cells: dict[tuple, dict[str, dict[float, float]]] = {}
    for each in sorted(rows, key=lambda each: each["plan"]):  # where a plan was kept, that time is the one that stays
        plain = each["op"] == "spmm_csr" and each["plan"] in ("each call", "kept")
        if plain and each["us"] and each["peer_us"]:
            times = cells.setdefault((each["dtype"], *each["shape"]), {})
            times.setdefault("qsparse", {})[each["density"]] = each["us"]
            times.setdefault(each["peer"], {})[each["density"]] = each["peer_us"]
    found = []
    for (dtype, *shape), times in cells.items():
        dense = next((times[name] for name in _DENSE if name in times), None)
        if dense is None:
            continue
        entry = {"dtype": dtype, "shape": shape}
        for name in ("qsparse", "torch_csr"):
            if name in times:
                entry[name] = _crossover(times[name], dense)
        found.append(entry)
    return found


def _crossover(sparse_us: dict[float, float], dense_us: dict[float, float]) -> float | None:
    """Where sparse / dense passes 1, from below."""
    points = [(density, sparse_us[density] / dense_us[density]) for density in sorted(sparse_us) if density in dense_us]
    if points[0][1] > 1:
        return 0.0
    for (low, below), (high, above) in itertools.pairwise(points):
        if above > 1:
            share = -math.log(below) / (math.log(above) - math.log(below))
            return round(math.exp(math.log(low) + share * (math.log(high) - math.log(low))), 4)
    return None


@dataclass(frozen=True)
class Result:
    """All rows of a run, the mean of each group, and the crossovers."""

    rows: list[dict]
    means: list[dict]
    crossovers: list[dict]

    @property
    def wrong(self) -> list[dict]:
        return [each for each in self.rows if not each["correct"]]

    def to_json(self) -> dict:
        found = {"rows": self.rows, "means": self.means, "crossovers": self.crossovers}
        return found | {"wrong": len(self.wrong)}

    def show(self, file) -> None:
        """Print the tables."""
        from qsparse.bench.tables import show_sparse

        show_sparse(self.rows, self.means, self.crossovers, file)


def bench(
    device: torch.device,
    *,
    ops: Iterable[str] = (),
    dtypes: Iterable[str] = (),
    shapes: Iterable[Shape] = (),
    densities: Iterable[float] = (),
    repetitions: int = REPETITIONS,
    out: Path | None = None,
    say: Callable[[str], None] = lambda line: None,
) -> Result:
    """Measure every operation, dtype, shape and density on `device` (nothing given: those that make sense there).

    Rows are appended to `out` as they come, `say` hears what is being measured. Raises UserError for what this device
    does not do, before anything runs.
    """
    on_gpu = device.type == "cuda"
    ops, dtypes, densities = tuple(ops), tuple(dtypes), tuple(densities)
    if ops and densities and set(ops) <= set(two_four.OPS):
        raise UserError(f"--density {densities[0]:g}: {ops[0]} has 2 of each 4 weights, half of them; leave it out")
    ops = ops or (OPS + two_four.OPS if on_gpu else CPU_OPS)
    for dtype in dtypes:
        if on_gpu and not any(_offered(op, dtype, on_gpu) for op in ops):
            raise UserError(f"--dtype {dtype}: {', '.join(ops)} has nothing to be compared with there; leave it out")
    dtypes = dtypes or (DTYPES[:2] if on_gpu else DTYPES[:1])
    of_24 = [op for op in ops if op in two_four.OPS]
    if not on_gpu and of_24:
        raise UserError(f"--op {of_24[0]}: a CPU has no sparse tensor cores; leave it out")
    without_peer = [op for op in ops if op not in CPU_OPS]
    if not on_gpu and without_peer:
        raise UserError(f"--op {without_peer[0]} has no peer on a CPU: leave it out")
    shapes_24 = tuple(shapes) or GPU_SHAPES
    shapes = tuple(shapes) or (GPU_SPARSE if on_gpu else CPU_SPARSE)
    if not on_gpu and dtypes != DTYPES[:1]:
        raise UserError(f"--dtype {dtypes[-1]}: on a CPU sparse products compute in float32; leave it out")
    where = environment(device)
    rows: list[dict] = []
    if out:
        append(out, ())  # refused now, and not after the first measurement
    unstructured = [op for op in ops if op not in two_four.OPS]
    for dtype, shape, density in _cells(dtypes if unstructured else (), shapes, densities or DENSITIES):
        given = problem(shape, density, dtype, device)
        for op in unstructured:
            if not _offered(op, dtype, on_gpu):
                continue
            say(f"{op} {dtype} {','.join(map(str, shape))} density {density:g}")
            more = measure(given, op, dtype, where, repetitions, say)
            rows.extend(more)
            if out:
                append(out, more)
    for op, shape in itertools.product(of_24, shapes_24):
        for dtype in [name for name in dtypes if _offered(op, name, on_gpu)] if op == "gemm_24" else ["int8"]:
            say(f"{op} {dtype} {','.join(map(str, shape))}")
            more = two_four.measure(op, dtype, shape, device, where, repetitions, say)
            rows.extend(more)
            if out:
                append(out, more)
    return Result(rows, means(rows), crossovers(rows))


def _offered(op: str, dtype: str, on_gpu: bool) -> bool:
    """Whether there is something to compare: PyTorch's COO and sampled product take no halves, tiles and 2:4 those
    alone, and int8 is int8."""
    if op in (*_TILES, "gemm_24"):
        return on_gpu and dtype != "float32"
    return dtype == "float32" if op in ("spmm_coo", "sddmm") else op != "gemm_int8_24"


def _cells(dtypes, shapes, densities) -> Iterator[tuple[str, Shape, float]]:
    yield from itertools.product(dtypes, shapes, densities)
