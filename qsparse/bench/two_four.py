"""2:4 weights on sparse tensor cores: our products against cuSPARSELt's and against our own dense ones.

A shape is that of the layer, M, N, K = batch rows, outputs, inputs; W (N, K) keeps two random columns of every four.
The int8 product is timed with its scaling (one scale for x, one a channel) and writes float16.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from qsparse import kernels
from qsparse.bench.harness import (
    EXACT,
    REPETITIONS,
    TOLERANCES,
    Call,
    Contender,
    Reference,
    Tolerance,
    compete,
    product_reference,
    row,
    willing,
)
from qsparse.bench.peers import pytorch, two_four
from qsparse.bench.shapes import Shape
from qsparse.sparse import compress_24

OPS = ("gemm_24", "gemm_int8_24")
DENSITY = 0.5
DENSE = "qsparse_dense"
"""The peer that is our own product with the same weights, zeros and all."""


@dataclass(frozen=True)
class Contest:
    """One call of ours, its peers, what is right, and what is moved at least."""

    ours: Call
    peers: dict[str, Callable[[], dict[str, Call]]]
    reference: Reference
    tolerance: Tolerance
    nbytes: int


def weights(n: int, k: int, generator: torch.Generator) -> Tensor:
    """Normal random (N, K) float32, two of every four columns of a row zero."""
    groups = -(-k // 4)
    rank = torch.rand((n, groups, 4), generator=generator, device=generator.device).argsort(dim=2)
    kept = (rank < 2).reshape(n, 4 * groups)[:, :k]
    return torch.randn((n, k), generator=generator, device=generator.device).masked_fill_(~kept, 0)


def contest(op: str, dtype: str, shape: Shape, device: torch.device) -> Contest:
    """The product that `op` names on seeded operands of `dtype` (int8 for gemm_int8_24)."""
    m, n, k = shape
    generator = torch.Generator(device).manual_seed(0)
    x, w = torch.randn((m, k), generator=generator, device=device), weights(n, k, generator)
    if op == "gemm_24":
        x, w = x.to(getattr(torch, dtype)), w.to(getattr(torch, dtype))
        values, metadata = compress_24(w)
        size = x.element_size()
        peers = {
            "cusparselt": functools.partial(two_four.products, x, w),
            DENSE: lambda: {DENSE: Call(functools.partial(kernels.gemm, x, w))},
            "cublas": functools.partial(pytorch.products, x, w),
        }
        ours = Call(functools.partial(kernels.gemm_24, x, values, metadata))
        nbytes = size * (m * k + values.numel() + m * n) + metadata.numel()
        return Contest(ours, peers, product_reference(x, w), TOLERANCES[dtype], nbytes)
    qx, qw = ((a * 32).round().clamp(-127, 127).to(torch.int8) for a in (x, w))
    values, metadata = compress_24(qw)
    product = functools.partial(kernels.gemm_int8_24, qx, values, metadata)
    dense = functools.partial(kernels.gemm_int8, qx, qw)
    scale_x = torch.full((1,), 2.0**-10, device=device)
    scale_w = torch.rand(n, generator=generator, device=device) + 0.5
    bare = product_reference(qx, qw)
    scaling = {"scale_x": scale_x, "scale_w": scale_w, "out_dtype": torch.float16}
    y = (bare.values.float() * scale_x * scale_w).half().to(torch.float64)
    return Contest(
        Call(functools.partial(product, **scaling)),
        {
            "cusparselt": functools.partial(two_four.products, qx, qw, torch.float16, scale_w * scale_x),
            DENSE: lambda: {DENSE: Call(functools.partial(dense, **scaling))},
        },
        Reference(y, bare.rows),
        EXACT,
        m * k + values.numel() + metadata.numel() + 2 * m * n,
    )


def measure(
    op: str,
    dtype: str,
    shape: Shape,
    device: torch.device,
    environment: dict,
    repetitions: int = REPETITIONS,
    say: Callable[[str], None] = lambda line: None,
) -> list[dict]:
    """Check and time a 2:4 product and its peers in one interleaved run; a row for each peer."""
    m, n, k = shape
    given = contest(op, dtype, shape, device)
    loose = TOLERANCES["float16"] if given.tolerance == EXACT else given.tolerance  # the library rounds elsewhere
    theirs: dict[str, Contender] = {}
    for peer, make in given.peers.items():
        try:
            theirs |= willing(make(), given.reference, loose, say)
        except RuntimeError as refusal:
            say(f"{peer} refused: {str(refusal).strip().splitlines()[0]}")
    ours = {"qsparse": Contender(given.ours, given.reference, given.tolerance)}
    measured, telemetry = compete(ours, theirs, device, repetitions)
    return [
        row(
            op=op,
            dtype=dtype,
            shape=shape,
            density=DENSITY,
            kernel=measured["qsparse"],
            peer=peer,
            against=measured[peer],
            flop=m * n * k,
            nbytes=given.nbytes,
            environment=environment,
            nnz=n * k // 2,
            plan="kept",
            **telemetry,
        )
        for peer in theirs
    ]
