"""cuSPARSELt behind PyTorch: the sparse tensor cores as a library offers them."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from qsparse.bench.harness import Call


def products(
    x: Tensor, w: Tensor, out_dtype: torch.dtype | None = None, scale: Tensor | None = None
) -> dict[str, Call]:
    """`(x @ w.T) * scale` with 2:4 w (N, K), compressed before, by the fastest of the algorithms that it tries.

    `scale` (N,) float32 and `out_dtype` belong to int8. Raises RuntimeError for what the library does not take.
    """
    packed, options = torch._cslt_compress(w), {"alpha": scale, "out_dtype": out_dtype, "transpose_result": True}
    best = torch._cslt_sparse_mm_search(packed, x.t(), **options)
    return {"cusparselt": Call(functools.partial(torch._cslt_sparse_mm, packed, x.t(), **options, alg_id=best))}
