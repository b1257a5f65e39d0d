"""The kernel of CSR in float32 on Hopper that takes groups of rows, by every choice of its host."""

from __future__ import annotations

import itertools

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _spmm_groups_sm90 as groups_sm90
from qsparse.kernels._load import source_text
from qsparse.kernels._spmm_groups_sm90 import TILES, Choice, Plan, choose, how_it_lies, run
from qsparse.sparse import to_csr

NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hopper():
    if kernels.spmm_csr.tier("cuda") != "sm90":
        pytest.skip("the kernel is for Hopper")
    return torch.device("cuda", 0)


def on(device, w) -> list[torch.Tensor]:
    return [part.to(device) for part in to_csr(w, w != 0)]


def test_every_choice_fits_a_hopper_card():
    """Its memory holds two slabs with as many entries as there can be, and the outputs; a cluster has slabs enough."""
    sizes = (17, 1, 1, 1), (64, 4096, 4096, 10**6), (60000, 256, 784, 20000), (20, 100_000, 40, 5000)
    for (m, n, k, nnz), tile in itertools.product(sizes, TILES):
        for room, lies in itertools.product((16, 16 * (1 + 4 * tile.width)), ("turned", "rows", "else")):
            us, choice = choose(m, n, k, nnz, tile, room, 132, lies)
            assert us > 0
            assert 1 <= choice.groups <= 16
            assert choice.turned or (lies == "rows" and tile == TILES[-1])
            assert choice.split <= -(-k // tile.width)
            assert 2 <= tile.stages(choice.groups, room, choice.turned) <= 8
            assert tile.shared(choice.groups, room, choice.turned) <= (227 - 2) * 1024
    first = TILES[0]
    assert first.stages(16, 16 * (1 + 4 * first.width), True) >= 2  # what plans rely on that do not look


def test_how_x_lies():
    """The copy engine wants rows, or columns, that start on 16 bytes."""
    x, odd = torch.empty(64, 36), torch.empty(64, 35)
    assert how_it_lies(x) == how_it_lies(x[:, :33]) == how_it_lies(x[:, 4:]) == how_it_lies(x[::2]) == "rows"
    assert how_it_lies(x.t()) == how_it_lies(x[:, :33].t()) == "turned"
    for other in (x[:, 1:], x[:, ::2], odd, odd.t(), x[:1].expand(64, 36)):
        assert how_it_lies(other) == "else"


def test_every_kernel_waits_for_the_one_before():
    """Each may be launched before that has ended; the one that lets its successor start has waited itself by then."""
    kernels_of = source_text(groups_sm90.SOURCE).split("__global__")[1:]
    assert len(kernels_of) == 5
    for text in kernels_of:
        before, wait, _ = text.partition("wait_for_predecessor();")
        assert wait
        assert "let_successor_start();" not in before


@pytest.mark.parametrize("nnz", [1, 511, 2**29, 2**31 - 1])
@pytest.mark.parametrize("n", [1, 2, 3, 1000, 2**20])
def test_the_longest_part_is_an_int_however_many_entries_there_are(n, nnz):
    limit = groups_sm90.longest_part(n, nnz)
    assert min(nnz, 512) <= limit < 2**31
    assert limit >= min(4 * nnz / n, 2**31 - 1)


@pytest.mark.gpu
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("density", [0.002, 0.2, 0.9])
@pytest.mark.parametrize("split", [1, 2, 4, 8])
def test_every_tile(look, density, split, hopper, normal, sparse, to_numpy, assert_close):
    """Rows and slabs that fill no block, rows that are split, x and y in all ways, x turned by blocks and before."""
    w = sparse(401, 1001, density)
    w[100] = normal(1001)
    values, cols, offsets = on(hopper, w)
    plan = Plan(cols, offsets, w.shape, look)
    assert plan.virtual > 401 or density > 0.5
    assert plan.tile == TILES[look and density < 0.5]
    x, bias = normal(333, 1001, device=hopper), normal(401, device=hopper)
    reference = (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0)
    wide, tall = normal(333, 1004, device=hopper)[:, :1001], normal(1001, 336, device=hopper).t()[:333]
    operands = x, x.t().contiguous().t(), wide.copy_(x), tall.copy_(x)
    assert [how_it_lies(each) for each in operands] == ["else", "else", "rows", "turned"]
    for count, turned in itertools.product((1, 9, 16), (False, True)):
        choice = Choice(count, split, turned)
        if plan.tile.stages(count, plan.room, turned) < 2:
            continue
        for operand in operands:
            for y in (x.new_full((333, 401), NAN), x.new_full((401, 333), NAN).t()):
                run(choice, operand, values, bias, y, True, plan)
                assert_close(y, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("look", [False, True])
@pytest.mark.parametrize("index", [torch.int32, torch.uint16], ids=str)
def test_repeated_columns_and_what_is_not_finite(look, index, hopper, normal, sparse, to_numpy, assert_close):
    """Parts with repeated columns among others in every division of K; NaN and Inf meet stored entries only."""
    w = sparse(401, 1001, 0.1)
    w[1], w[2], w[5, :40] = normal(1001), 0, 1.5  # the first is in parts
    values, cols, offsets = on(hopper, w)
    third = slice(int(offsets[3]), int(offsets[4]))
    values[third], cols[third] = values[third].flip(0), cols[third].flip(0)
    dense, repeats = to_numpy(w).copy(), torch.zeros(401, dtype=torch.bool, device=hopper)
    for n in (1, 36, 200, 400):
        at = int(offsets[n])
        dense[n, int(cols[at])] -= float(values[at])
        dense[n, int(cols[at + 5])] += float(values[at])
        cols[at] = cols[at + 5]
        repeats[n] = True
    plan = Plan(cols.to(index), offsets, dense.shape, look)
    found = torch.zeros_like(repeats)
    parts = plan.parts[: int(plan.first[401])]
    found[parts[parts[:, 4] == 1, 0].long()] = True
    assert torch.equal(found, repeats)
    x, bias = normal(300, 1004, device=hopper)[:, :1001], normal(401, device=hopper)
    clean = to_numpy(x) @ dense.T + to_numpy(bias)
    rows = torch.repeat_interleave(torch.arange(401, device=hopper), offsets.diff().long())
    stored = torch.zeros(401, 1001, dtype=torch.bool, device=hopper)
    stored[rows, cols.long()] = True
    own, shared = int(cols[int(offsets[36])]), 7  # a column that repeats, and another
    x[1, own], x[299, shared] = NAN, INF
    touched = torch.zeros(300, 401, dtype=torch.bool, device=hopper)
    touched[1], touched[299] = stored[:, own], stored[:, shared]
    assert touched[1, 36]
    assert not touched.all(dim=1).any()
    reference = clean[(~touched).cpu().numpy()]
    for split, turned in itertools.product((1, 2, 4, 8), (False, True)):
        y = x.new_full((300, 401), NAN)
        run(Choice(5, split, turned), x, values, bias, y, False, plan)
        assert torch.equal(y.isfinite(), ~touched)
        assert_close(y[~touched], reference)
