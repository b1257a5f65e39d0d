"""Few rows of CSR weights times many batch rows on Hopper: the kernel by every choice of its host, and who takes it."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _spmm_tall_sm90 as tall_sm90
from qsparse.kernels._load import launched
from qsparse.kernels._spmm_tall_sm90 import MOST_ROWS, Choice, Plan, choose, pieces, plan, run, shared, takes
from qsparse.sparse import to_csr

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hopper():
    if kernels.spmm_csr.tier("cuda") != "sm90":
        pytest.skip("the kernel is for Hopper")
    return torch.device("cuda", 0)


def on(device, w) -> list[torch.Tensor]:
    return [part.to(device) for part in to_csr(w, w != 0)]


@pytest.mark.parametrize("room", [16, 1024, 3072, 16 * (1 + 6 * 64)])
@pytest.mark.parametrize("n", [4, 144, 256, MOST_ROWS])
def test_every_choice_fits_a_hopper_card(n, room):
    """Its memory holds two slabs, whatever lies in them, and two pieces of x; a warp has one group at most."""
    for m, k in ((17, 1), (10000, 784), (60000, 4096)):
        us, choice = choose(m, n, k, n * k // 10 + 1, room, 132)
        groups = math.ceil(math.ceil(n / 12) / choice.row_blocks)
        assert us > 0
        assert 1 <= groups <= 12
        assert 2 <= pieces(groups, room) <= 4
        assert shared(groups, room) <= (227 - 1) * 1024


def test_the_copy_engine_takes_rows_that_start_on_16_bytes():
    x, odd = torch.empty(64, 36), torch.empty(64, 35)
    assert all(map(takes, (x, x[:, :33], x[:, 4:], x[::2])))
    assert not any(map(takes, (x.t(), x[:, 1:], x[:, ::2], odd, x[:1].expand(64, 36))))


def test_no_plan_beyond_what_kernels_count():
    cols = torch.empty(2**31 - 2**14, dtype=torch.int32, device="meta")
    assert plan(cols, cols, (MOST_ROWS, 2**22), even=True) is None


@pytest.mark.gpu
@pytest.mark.parametrize("size", [(4, 8), (40, 1000), (144, 64), (256, 784), (52, 4100)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.02, 0.3])
def test_every_choice(density, size, hopper, normal, sparse, to_numpy, assert_close):
    """Groups, slabs and batches that are not full, both types of indices, rows without entries, items one by one."""
    n, k = size
    w = sparse(n, k, density)
    w[n // 2] = normal(k)
    values, cols, offsets = on(hopper, w)
    bias, wide = normal(n, device=hopper), normal(700, k + 4, device=hopper)
    for m, index in ((1, torch.int32), (255, torch.uint16), (700, torch.int32)):
        found = Plan(cols.to(index), offsets, (n, k))
        assert not found.repeats
        x = wide[:m, 4:] if k % 4 == 0 else wide[:m, :k]
        reference = to_numpy(x) @ to_numpy(w).T
        for row_blocks in {math.ceil(found.groups / 12), math.ceil(found.groups / 2), found.groups}:
            if pieces(math.ceil(found.groups / row_blocks), found.room) < 1:
                continue
            for each, relu in ((bias, True), (None, False)):
                y = x.new_full((m, n), NAN)
                run(Choice(row_blocks), x, values, each, y, relu, found)
                plain = reference + (0 if each is None else to_numpy(each))
                assert_close(y, plain.clip(min=0) if relu else plain)
                again = torch.empty_like(y)
                run(Choice(row_blocks), x, values, each, again, relu, found)
                assert torch.equal(y, again)


@pytest.mark.gpu
def test_what_is_not_finite_meets_stored_entries_only(hopper, normal, sparse):
    w = sparse(64, 200, 0.1)
    values, cols, offsets = on(hopper, w)
    found, x = Plan(cols, offsets, w.shape), normal(300, 200, device=hopper)
    x[1, 7], x[299, 150] = NAN, INF
    y = x.new_empty(300, 64)
    run(Choice(1), x, values, None, y, False, found)
    stored = (w != 0).to(hopper)
    assert torch.equal(~y[1].isfinite(), stored[:, 7])
    assert torch.equal(~y[299].isfinite(), stored[:, 150])
    assert y[torch.arange(300, device=hopper) % 298 != 1].isfinite().all()


@pytest.mark.gpu
def test_no_plan_where_it_is_of_no_use(hopper, normal, sparse):
    w = sparse(64, 200, 0.1)
    _, cols, offsets = on(hopper, w)
    assert plan(cols, offsets, w.shape, even=True)
    assert plan(cols, offsets, w.shape, even=False) is None
    cols[1] = cols[0]
    assert plan(cols, offsets, w.shape, even=True) is None
    for n in (MOST_ROWS + 4, 62):
        w = sparse(n, 200, 0.1)
        assert plan(*on(hopper, w)[1:], w.shape, even=True) is None


@pytest.mark.gpu
def test_the_face_takes_it_for_tall_products(hopper, normal, sparse, to_numpy, assert_close):
    """With a plan, a row-major y and rows of x that the copy engine takes."""
    w = sparse(128, 784, 0.05)
    values, cols, offsets = on(hopper, w)
    kept, x = kernels.spmm_csr.plan(cols, offsets, shape=w.shape), normal(60000, 784, device=hopper)
    options = {"shape": w.shape, "check": False}
    for columns, operand, own in itertools.product((False, True), (x, x[:, :784].t().contiguous().t()), (None, kept)):
        with launched() as ran:
            y = kernels.spmm_csr(operand, values, cols, offsets, plan=own, columns=columns, **options)
        takes_it = own is not None and operand is x and not columns
        assert any(name.startswith(tall_sm90.SOURCE) for name in ran) == takes_it
        assert_close(y[::1000], to_numpy(x[::1000]) @ to_numpy(w).T)
