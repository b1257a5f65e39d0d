"""The kernel of CSR in float32 on Hopper for many batch rows and few entries."""

from __future__ import annotations

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _spmm_tall_sm90 as tall
from qsparse.kernels._load import launched
from qsparse.sparse import to_csr

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hopper():
    if kernels.spmm_csr.tier("cuda") != "sm90":
        pytest.skip("the kernel is for Hopper")
    return torch.device("cuda", 0)


@pytest.mark.parametrize("m", [1, 128, 129, 16_897, 60_000, 10**6])
@pytest.mark.parametrize("row_blocks", [1, 4, 16, 1000])
def test_pieces_are_shared_out_in_no_more_rounds(m, row_blocks):
    step, waves = tall.pieces(m, row_blocks, 132)
    assert 4 <= step <= 128
    assert step % 4 == 0
    assert -(-m // step) * row_blocks <= waves * 132
    assert waves == -(-(-(-m // 128) * row_blocks) // 132)


@pytest.mark.parametrize(
    ("shape", "nnz"),
    [
        ((1_100_000_000, 128), 600_000_000),  # more places than an int counts
        ((60_000, 64), 38_400),  # slabs that are half empty
        ((60_001, 784), 940_000),
        ((60_000, 784), 180_000),
        ((60_000, 784), 1_500_000),
    ],
    ids=str,
)
def test_patterns_that_have_no_plan(shape, nnz):
    assert tall.plan(torch.empty(nnz, dtype=torch.int32, device="meta"), None, shape) is None


@pytest.mark.gpu
@pytest.mark.parametrize("index", [torch.int32, torch.uint16], ids=str)
@pytest.mark.parametrize("size", [(17, 131), (256, 784), (300, 5000), (777, 260)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.035])
def test_every_size(size, density, index, hopper, normal, sparse, to_numpy, assert_close):
    """Rows and slabs that fill no block, more columns than are put in order at once, y with and without vectors."""
    w = sparse(*size, density)
    w[size[0] // 2, :9], w[3] = normal(9), 0
    values, cols, offsets = (part.to(hopper) for part in to_csr(w, w != 0))
    plan = tall.Plan(cols.to(index), offsets, size)
    assert plan.stages >= 2
    n, k = size
    for m in (1, 130, 1000):
        x, bias = normal(m, -(-k // 4) * 4 + 4, device=hopper)[:, :k], normal(n, device=hopper)
        reference = to_numpy(x) @ to_numpy(w).T
        for y in (x.new_full((m, n), NAN), x.new_full((m, n + 8), NAN)[:, :n]):
            tall.run(x, values, None, y, False, plan)
            assert_close(y, reference)
        tall.run(x, values, bias, y, True, plan)
        assert_close(y, (reference + to_numpy(bias)).clip(min=0))


@pytest.mark.gpu
def test_more_pieces_than_blocks_and_what_is_not_finite(hopper, normal, sparse, to_numpy, assert_close):
    """NaN and Inf meet stored entries only; the same bits every run; the face takes the kernel."""
    w = sparse(256, 784, 0.02)
    values, cols, offsets = (part.to(hopper) for part in to_csr(w, w != 0))
    x = normal(40_000, 784, device=hopper)
    plan = kernels.spmm_csr.plan(cols, offsets, shape=w.shape)
    assert tall.pieces(len(x), plan.tall.row_blocks, 132)[1] > 1
    clean = x.double() @ w.to(hopper).double().t()

    def product():
        with launched() as ran:
            y = kernels.spmm_csr(x, values, cols, offsets, shape=w.shape, plan=plan)
        assert ran[-1] == f"{tall.SOURCE}:spmm_csr_tall"
        return y

    y = product()
    assert torch.equal(y, product())
    assert_close(y, to_numpy(clean))
    x[5, 7], x[39_999, 783] = NAN, INF
    touched = torch.zeros_like(y, dtype=torch.bool)
    touched[5], touched[39_999] = w[:, 7].to(hopper) != 0, w[:, 783].to(hopper) != 0
    assert torch.equal(product().isfinite(), ~touched)


@pytest.mark.gpu
def test_who_has_a_plan(hopper, sparse):
    """Sparse patterns, but not too sparse ones, of columns that do not repeat, for outputs of whole vectors."""
    for n, density, repeats, has in (
        (256, 0.02, False, True),
        (256, 0.2, False, False),
        (256, 0.0, False, False),
        (255, 0.02, False, False),
        (256, 0.02, True, False),
    ):
        w = sparse(n, 784, density)
        w[0, :2] = 1.0
        _, cols, offsets = (part.to(hopper) for part in to_csr(w, w != 0))
        if repeats:
            cols[1] = cols[0]
        assert (kernels.spmm_csr.plan(cols, offsets, shape=w.shape).tall is not None) == has
