"""cuSPARSELt behind PyTorch: the sparse tensor cores as a library offers them."""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch
from torch import Tensor

from qsparse.bench.harness import Call

_REPLAYS = 3
# Its own search for the best algorithm fails on an H200 (CUDA 13.0, PyTorch 2.11) and leaves the GPU unusable; of all
# twelve these were the fastest there at one shape or another.
_INT8, _FLOAT = (3, 5, 1), (6, 5, 2)


def products(
    x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, scale: Tensor | None = None
) -> dict[str, Call]:
    """`(x @ w.T) * scale` with 2:4 w (N, K), compressed before, by the fastest of a few of its algorithms.

    `scale` (N,) float32 and `out_dtype` belong to int8. Raises RuntimeError for what the library does not take.
    """
    packed = torch._cslt_compress(w)
    options = {"alpha": scale, "out_dtype": out_dtype, "transpose_result": True}
    multiply = functools.partial(torch._cslt_sparse_mm, packed, x.t(), **options)
    algorithms = _INT8 if w.dtype == torch.int8 else _FLOAT
    times = {algorithm: _us(functools.partial(multiply, alg_id=algorithm)) for algorithm in algorithms}
    return {"cusparselt": Call(functools.partial(multiply, alg_id=min(times, key=times.__getitem__)))}


def _us(call: Callable[[], Tensor]) -> float:
    """Microseconds on the GPU alone: a call keeps the host for longer than that."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        call()
    graph.replay()
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(_REPLAYS):
        graph.replay()
    end.record()
    torch.cuda.synchronize()
    return start.elapsed_time(end) / _REPLAYS * 1e3
