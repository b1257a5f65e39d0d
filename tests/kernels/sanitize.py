"""Launch every kernel at small shapes: `compute-sanitizer --tool memcheck python tests/kernels/sanitize.py [PART ...]`.

The parts are the functions below, all by default: `racecheck` takes minutes, and a process for each saves most of them.
With PYTORCH_NO_CUDA_MEMORY_CACHING=1 arrays have no neighbours, and what is read beyond one shows.

Not a test by itself (pytest does not collect it): the sanitizer watches, and what is computed is checked elsewhere.
"""

from __future__ import annotations

import contextlib
import itertools
import math
import sys
from unittest import mock

import torch

from qsparse import kernels
from qsparse.kernels import (
    _gemm_24_sm90,
    _gemm_single_sm90,
    _gemm_sm90,
    _load,
    _mlp_int8_row_sm90,
    _mlp_int8_rows_sm90,
    _mlp_int8_sm90,
    _mlp_int8_tall_sm90,
    _sddmm_sm80,
    _spmm,
    _spmm_entries_sm90,
    _spmm_expand_sm90,
    _spmm_groups_sm90,
    _spmm_product_sm90,
    _spmm_slab_sm90,
    _spmm_sm80,
    _spmm_tall_sm90,
)
from qsparse.sparse import compress_24
from qsparse.sparse.bitmap_tiles import to_bitmap_tiles
from qsparse.sparse.entry_tiles import to_entry_tiles

DEVICE = torch.device("cuda", 0)


def normal(*shape: int, dtype=torch.float32) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE).to(dtype)


def dense() -> None:
    for m, n, k in ((72, 136, 200), (5, 7, 9), (130, 10, 64)):
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x, w, bias = normal(m, k, dtype=dtype), normal(n, k, dtype=dtype), normal(n, dtype=dtype)
            for tier in ("simt", "sm80", "sm90"):
                if tier == "simt" or (dtype != torch.float32 and k % 8 == 0 and kernels.gemm.tier(DEVICE) != "simt"):
                    kernels.gemm(x, w, bias, relu=True, tier=tier)
            y, mask = kernels.gemm(x, w, bias, relu=True, return_mask=True)
            dz, _ = kernels.bias_relu_grad(y, y)
            kernels.gemm(dz, w.t(), mask=torch.ones((m, -(-k // 64)), dtype=torch.int64, device=DEVICE))
            kernels.gemm(dz.t(), x.t(), out=torch.zeros((n, k), dtype=dtype, device=DEVICE), accumulate=True)
            assert mask.shape == (m, -(-n // 64))
    x, w = normal(256, 520), normal(640, 520)
    for precision in ("ieee", "high"):
        kernels.gemm(x, w, precision=precision)
    kernels.gemm(normal(1024, 520), normal(640, 520), precision="highest")
    if kernels.gemm.tier(DEVICE) == "sm90":
        x, w, bias = (normal(*size, dtype=torch.float16) for size in ((264, 328), (392, 328), (392,)))
        for config in (*_gemm_sm90.CONFIGS, *_gemm_single_sm90.CONFIGS):
            _gemm_sm90.run(config, x, w, bias, True)


def quantized() -> None:
    for m, n, k in ((70, 65, 130), (3, 5, 7), (1, 10, 784), (300, 264, 528), (2, 3, 5000), (2, 3, 40_000)):
        scale_y = torch.ones(1, device=DEVICE)
        for symmetric in (True, False):
            q, scale, *zero, _ = kernels.quantize_rows(normal(m, k), symmetric=symmetric, return_sums=True)
            kernels.quantize_rows(normal(m, k, dtype=torch.bfloat16), scale_y, symmetric=symmetric, relu=True)
            q_w, scale_w = kernels.quantize_rows(normal(n, k, dtype=torch.float16))
            correction = {"zero_x": zero[0]} if zero else {}
            for tier in ("simt", "sm80", "sm90"):
                if tier != "simt" and (k % 16 or kernels.gemm_int8.tier(DEVICE) < tier):
                    continue
                for out_dtype in (torch.float32, torch.float16, torch.int8):
                    options = {"out_dtype": out_dtype, "scale_y": scale_y if out_dtype == torch.int8 else None}
                    kernels.gemm_int8(q, q_w, scale, scale_w, normal(n), relu=True, tier=tier, **options, **correction)
                kernels.gemm_int8(q, q_w, out_dtype=torch.int32, tier=tier)
            kernels.gemm_int8(q, q_w, out_dtype=torch.int64)
    for m, n, k in ((72, 136, 208), (5, 7, 9)):
        x, w = (normal(rows, k).to(torch.float8_e4m3fn) for rows in (m, n))
        kernels.gemm_fp8(x, w, normal(m), normal(n), normal(n), relu=True)


def weight_only() -> None:
    for n, k in ((70, 784), (33, 101), (300, 1024)):
        for dtype in (torch.float16, torch.bfloat16):
            for m in (1, 9, 40, 65, 300):
                x, bias = normal(m, k, dtype=dtype), normal(n, dtype=dtype)
                q = torch.randint(-8, 8, (n, k), dtype=torch.int8, device=DEVICE)
                kernels.gemm_weight_only(x, q, normal(n), bias, relu=True)
                packed = torch.randint(0, 256, (n, -(-k // 2)), dtype=torch.uint8, device=DEVICE)
                kernels.gemm_weight_only(x, packed, normal(n, -(-k // 64)), group=64)


def networks() -> None:
    for sizes, m in (((784, 256, 10), 40), ((64, 32, 48, 10), 1), ((61, 130, 5, 3), 7), ((100, 10), 20)):
        quantized = [kernels.quantize_rows(normal(n, k)) for k, n in itertools.pairwise(sizes)]
        weights, scales = zip(*quantized, strict=True)
        biases, x = [normal(n) for n in sizes[1:]], normal(m, sizes[0])
        kernels.mlp_int8(x, weights, scales, biases)
        if kernels.mlp_int8.tier(DEVICE) == "sm90":
            layers = list(zip(weights, scales, biases, [None] * len(biases), strict=True))
            for config, group in itertools.product(_mlp_int8_sm90.CONFIGS, (1, 4, 24)):
                plan = _mlp_int8_sm90.plan(sizes, m, config, group)
                if plan and plan.groups * group <= 132:
                    _mlp_int8_sm90.launch_mlp(x, layers, plan)
            for config in _mlp_int8_row_sm90.CONFIGS:
                plan = _mlp_int8_row_sm90.plan(sizes, m, config)
                if plan:
                    _mlp_int8_row_sm90.launch_mlp(x, layers, plan)
            for config in _mlp_int8_rows_sm90.CONFIGS:
                if _mlp_int8_rows_sm90.panels(sizes, config):
                    _mlp_int8_rows_sm90.launch_mlp(x, layers, config)
            for config in _mlp_int8_tall_sm90.CONFIGS:
                _mlp_int8_tall_sm90.launch_mlp(x, layers, config)
        kernels.linear_int8(x, weights[0][:10], scales[0][:10], biases[0][:10])


def random_csr(n: int, k: int, dtype=torch.float32, density: float = 0.2) -> tuple[torch.Tensor, ...]:
    rows, cols = (torch.rand(n, k, device=DEVICE) < density).nonzero().unbind(1)
    offsets = torch.searchsorted(rows, torch.arange(n + 1, device=DEVICE))
    return normal(len(rows), dtype=dtype), cols.int(), offsets.int()


def sparse() -> None:
    arrays = random_csr(37, 50)
    rows = torch.repeat_interleave(torch.arange(37, dtype=torch.int32, device=DEVICE), arrays[2].diff())
    for m, any_card in itertools.product((1, 9, 40), (False, True)):
        x, dy, bias = normal(m, 50), normal(m, 37), normal(37)
        with mock.patch.object(_spmm, "has_sm80", return_value=False) if any_card else contextlib.nullcontext():
            kernels.spmm_csr(x, *arrays, bias, shape=(37, 50), relu=True)
            kernels.spmm_coo(x, arrays[0], rows, arrays[1], bias, shape=(37, 50))
            kernels.sddmm(dy, x, *arrays[1:])
    for n, k in ((37, 50), (300, 1000)):
        w = normal(n, k, dtype=torch.float16)
        tiles = to_bitmap_tiles(w, w > 0.5)
        for m, tier in itertools.product((1, 9, 20, 64, 100), {"simt", kernels.spmm_bitmap.tier(DEVICE)}):
            kernels.spmm_bitmap(normal(m, k, dtype=torch.float16), *tiles, shape=(n, k), relu=True, tier=tier)
        entries, bias = to_entry_tiles(w, w > 0.5), normal(n, dtype=torch.float16)
        best = kernels.spmm_entries.tier(DEVICE)
        for m, tier in itertools.product((1, 9, 20, 64), {"simt", "simt" if best == "simt" else "sm80"}):
            kernels.spmm_entries(normal(m, k, dtype=torch.float16), *entries, bias, shape=(n, k), tier=tier)
        for split, m in itertools.product(_spmm_entries_sm90.SPLITS if best == "sm90" else (), (9, 70)):
            y = torch.empty((m, n), dtype=torch.float16, device=DEVICE)
            _spmm_entries_sm90.launch_some(split, normal(m, k, dtype=y.dtype), *entries, bias, y, True)
        arrays = random_csr(n, k, torch.float16)
        plan = kernels.spmm_csr.plan(*arrays[1:], shape=(n, k))
        for m in (1, 9, 20, 64):
            x = normal(m, k, dtype=torch.float16)
            x[0, 3] = math.nan
            kernels.spmm_csr(x, *arrays, bias, shape=(n, k), plan=plan)


def large_sparse() -> None:
    """The kernels for large batches, by name: at these shapes the faces would take others."""
    if not _spmm.has_sm80(DEVICE):
        return
    n, m = 90, 70
    for dtype, k in itertools.product((torch.float32, torch.float16), (301, 1101)):
        arrays = random_csr(n, k, dtype)
        values, cols, offsets = arrays
        x, dy, bias = normal(m, k, dtype=dtype), normal(m, n, dtype=dtype), normal(n, dtype=dtype)
        y, plan = torch.empty((m, n), dtype=dtype, device=DEVICE), kernels.spmm_csr.plan(cols, offsets, shape=(n, k))
        for tile in _spmm_sm80.tiles(dtype.itemsize, _spmm_sm80.shared_budget(0)):
            _spmm_sm80.run_tile(tile, 40, x, *arrays, bias, y, True, plan)
        _sddmm_sm80.run_tiles(50, dy, x, cols, offsets, plan)
        for few, index in itertools.product((5, 16), (torch.int32, torch.uint16)):
            _sddmm_sm80.run_few(dy[:few], x[:few], cols.to(index), offsets)
        far = (torch.arange(n + 1, device=DEVICE) / n).ceil().int()  # 1 entry in row 0, no other but in the last row
        far[n] = 2
        _sddmm_sm80.run_few(dy[:5], x[:5], cols[:2], far)
        for slices in (1, 8):
            choice = _sddmm_sm80.Slabs(37, slices, 1)
            if choice.shared(k) <= _spmm_sm80.shared_budget(0) and (slices == 1 or k >= slices * 128):
                _sddmm_sm80.run_slabs(choice, dy, x, cols, offsets, plan)
        if kernels.spmm_csr.tier(DEVICE) != "sm90":
            continue
        for v, split in itertools.product((1, 2) if dtype == torch.float32 else (2,), (1, 2, 4, 8)):
            choice = _spmm_slab_sm90.Choice(v, 34, split)
            if choice.fits(k, dtype.itemsize) and (split == 1 or k >= split * _spmm_slab_sm90.PLAN_WIDTH):
                _spmm_sm80.run_slab(choice, x, *arrays, bias, y, True, plan)
        _spmm_expand_sm90.spmm(x, *arrays, bias, n, True)
        if dtype == torch.float16:
            x = normal(m, -(-k // 8) * 8, dtype=dtype)[:, :k]
            x[3, 4] = float("nan")
            for config in _spmm_product_sm90.POSSIBLE:
                w = _spmm_expand_sm90.expand(*arrays, (n, k))
                _spmm_product_sm90.product(x, w, *arrays, bias, n, True, config)
    if kernels.spmm_csr.tier(DEVICE) == "sm90":
        values, cols, offsets = random_csr(401, 1001)
        x, y, bias = normal(333, 1004)[:, :1001], normal(333, 401), normal(401)
        cols[int(offsets[200])] = cols[int(offsets[200]) + 1]  # a column repeats
        for look, split, turned in itertools.product((False, True), (1, 2, 4, 8), (False, True)):
            plan = _spmm_groups_sm90.Plan(cols.to(torch.uint16) if turned else cols, offsets, (401, 1001), look)
            _spmm_groups_sm90.run(_spmm_groups_sm90.Choice(9, split, turned), x, values, bias, y, True, plan)
        for index in (torch.int32, torch.uint16):
            values, cols, offsets = random_csr(300, 300, density=0.03)
            plan = _spmm_tall_sm90.Plan(cols.to(index), offsets, (300, 300))
            _spmm_tall_sm90.run(normal(300, 304)[:, :300], values, normal(300), normal(300, 300), True, plan)
        for n, k, batches in ((600, 304, (1, 3, 13)), (3, 4000, (8,))):  # rows of a warp, and of a whole block
            arrays = random_csr(n, k)
            for m in batches:
                kernels.spmm_csr(normal(m, k), *arrays, normal(n), shape=(n, k), relu=True)


def two_of_four() -> None:
    for m, n, k in ((72, 136, 192), (300, 10, 784), (5, 7, 9), (16, 264, 1000)):
        w = normal(n, k) * (torch.arange(k, device=DEVICE) % 4 % 3 == 0)
        values, metadata = compress_24(w.half())
        x, q, scale = normal(m, k, dtype=torch.float16), *kernels.quantize_rows(normal(m, k))
        kept = (values * 32).to(torch.int8)
        for tier, out_dtype in itertools.product(("simt", "sm80", None), (torch.float16, torch.float32)):
            if tier != "sm80" or (k % 32 == 0 and kernels.gemm_24.tier(DEVICE) != "simt"):
                kernels.gemm_24(x, values, metadata, normal(n, dtype=torch.float16), out_dtype=out_dtype, tier=tier)
                kernels.gemm_int8_24(q, kept, metadata, scale, None, normal(n), out_dtype=out_dtype, tier=tier)
        for config in _gemm_24_sm90.CONFIGS if kernels.gemm_24.tier(DEVICE) == "sm90" else ():
            y = torch.empty((m, n), dtype=torch.float16, device=DEVICE)
            _gemm_24_sm90.launch_gemm(x, values, metadata, y, (None, True), config)


def training() -> None:
    kernels.softmax_cross_entropy(normal(33, 10), torch.arange(33, device=DEVICE) % 10)
    parameter = normal(1000)
    kernels.sgd(parameter, normal(1000), normal(1000), lr=0.1, momentum=0.9, mask=parameter > 0)
    images, order = torch.randint(0, 256, (70, 784), dtype=torch.uint8, device=DEVICE), torch.arange(70, device=DEVICE)
    shapes = (784, 64, 10), (784, 16, 3), (784, 9, 8, 1), (784, 300, 10)
    for sizes, batch in zip(shapes, (64, 1, 1, 64), strict=True):
        count = sum(n * (k + 1) for k, n in itertools.pairwise(sizes))
        rates = torch.full((-(-len(order) // batch),), 0.1, device=DEVICE)
        for mask in (None, torch.ones(count, dtype=torch.bool, device=DEVICE)):  # a mask is not for sm90
            given = images, order % sizes[-1], order, rates, 0.1 * normal(count), normal(count), mask
            for precision in ("highest", "high"):
                kernels.train_mlp(*given, sizes=sizes, batch=batch, momentum=0.9, precision=precision)
                kernels.train_mlp(*given[:5], None, mask, sizes=sizes, batch=batch, precision=precision)


PARTS = {
    part.__name__: part
    for part in (dense, quantized, weight_only, networks, sparse, large_sparse, two_of_four, training)
}


def main() -> int:
    with _load.launched() as launches:
        for name in sys.argv[1:] or PARTS:
            PARTS[name]()
        torch.cuda.synchronize()
    print(f"{len(launches)} launches of {len({launch.partition(':')[0] for launch in launches})} sources")
    return 0


if __name__ == "__main__":
    sys.exit(main())
