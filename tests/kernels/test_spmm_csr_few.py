"""Few rows of x in halves times CSR whose pattern is known: the kernel that writes tiles out on its way."""

import itertools

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _spmm_few_sm80, _weight_tiles_sm80
from qsparse.kernels._load import launched
from qsparse.sparse import to_csr

DTYPES = [torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(autouse=True)
def _however_sparse(monkeypatch):
    """Also what a Hopper card leaves to other kernels."""
    monkeypatch.setattr(_spmm_few_sm80, "_SPARSEST", 0.0)


def csr_of(w: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    return tuple(part.to(device) for part in to_csr(w, w != 0))


def planned(x, csr, bias=None, *, shape, **options):
    """The product with a plan; on a GPU by the kernel of this file, if there is anything to multiply."""
    plan = kernels.spmm_csr.plan(*csr[1:], shape=shape)
    with launched() as ran:
        y = kernels.spmm_csr(x, *csr, bias, shape=shape, plan=plan, **options)
    if x.is_cuda and plan is not None and 0 < x.shape[0] <= _weight_tiles_sm80.FEW_ROWS:
        assert {name.partition(":")[0] for name in ran} == {_spmm_few_sm80.SOURCE}
    return y


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [1, 8, 9, 30, 64, 65])
@pytest.mark.parametrize("density", [0.05, 0.3, 1.0])
def test_matches_numpy(device, dtype, m, density, normal, sparse, to_numpy, assert_close):
    """Also more entries a tile than are fetched ahead, several tiles a warp, and sizes that are no multiples."""
    for size in ((5, 70), (65, 1000), (270, 4500)):
        w = sparse(*size, density, dtype)
        values, cols, offsets = csr_of(w, device)
        x, bias = normal(m, size[1], dtype=dtype, device=device), normal(size[0], dtype=dtype, device=device)
        reference = to_numpy(x) @ to_numpy(w).T
        assert_close(planned(x, (values, cols, offsets), shape=size), reference)
        y = planned(x, (values, cols.to(torch.uint16), offsets), bias, shape=size, relu=True)
        assert_close(y, (reference + to_numpy(bias)).clip(min=0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("division", _spmm_few_sm80.DIVISIONS, ids=str)
def test_every_division(division, dtype, normal, sparse, to_numpy, assert_close, assert_same_bits):
    """Blocks that have rows of x of their own, too."""
    device = torch.device("cuda", 0)
    w = sparse(270, 1500, 0.15, dtype)
    values, cols, offsets = csr_of(w, device)
    pattern = _spmm_few_sm80.pattern(cols, offsets, w.shape)
    for m in (division.batch - 3, 3 * division.batch - 1):
        x = normal(m, 1500, dtype=dtype, device=device)
        y, again = (
            _spmm_few_sm80.spmm(division, x, values, cols, offsets, None, 270, False, pattern) for _ in range(2)
        )
        assert_close(y, to_numpy(x) @ to_numpy(w).T)
        assert_same_bits(y, again)


@pytest.mark.parametrize("m", [2, 30])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_9_what_is_not_finite_meets_stored_entries_only(device, m, dtype, sparse, normal, to_numpy, assert_close):
    w = sparse(50, 400, 0.3, dtype)
    csr = csr_of(w, device)
    x, bias = normal(m, 400, dtype=dtype, device=device), normal(50, dtype=dtype, device=device)
    clean = planned(x, csr, bias, shape=w.shape)
    kept = w.to(device) != 0
    for value in (NAN, INF, -INF):
        x[1, 5], x[1, 6] = value, value
        y = planned(x, csr, bias, shape=w.shape)
        touched = kept[:, 5] | kept[:, 6]
        assert torch.equal(y[1].isfinite(), ~touched)
        assert_close(y[:, ~touched], to_numpy(kernels.spmm_csr(x, *csr, bias, shape=w.shape)[:, ~touched]))
        assert torch.equal(y[0], clean[0])
        assert torch.equal(planned(x, csr, bias, shape=w.shape, relu=True).isnan(), y.isnan())
    csr[0][0] = NAN
    assert planned(x, csr, shape=w.shape)[0].isnan().sum() == 1


def test_case_12_views(device, normal, sparse, to_numpy, assert_close):
    w = sparse(40, 95, 0.3, torch.float16)
    csr = csr_of(w, device)
    wide = normal(190, 190, dtype=torch.float16, device=device)
    for x in (wide[:9, :95], wide[:95, :9].t(), wide[:18:2, ::2], wide.flip(1)[:9, :95], wide[:1, :95].expand(9, -1)):
        assert_close(planned(x, csr, shape=w.shape), to_numpy(x) @ to_numpy(w).T)


@pytest.mark.parametrize("m", [1, 40])
def test_a_dense_row_and_empty_ones(device, m, normal, to_numpy, assert_close):
    w = torch.zeros(300, 300, dtype=torch.float16)
    w[70], w[:, 3] = normal(300).abs(), 1
    w[200:] = 0
    w[100:, :290:9] = 2
    x = normal(m, 300, dtype=torch.float16, device=device).abs()
    assert_close(planned(x, csr_of(w, device), shape=w.shape), to_numpy(x) @ to_numpy(w).T)


@pytest.mark.parametrize("size", [(100, 300), (33, 65)], ids=str)
def test_the_pattern_entry_by_entry(size, sparse):
    """What each lane would store where, by the description of the layout."""
    w = sparse(*size, 0.4, torch.float16)
    values, cols, offsets = to_csr(w, w != 0)
    pattern = _spmm_few_sm80.pattern(cols, offsets, size)
    rows, columns = torch.meshgrid(torch.arange(32), torch.arange(64), indexing="ij")
    where = {int(at): (int(r), int(c)) for at, r, c in zip(*map(torch.flatten, _where(rows, columns)), strict=True)}
    tall, wide = _weight_tiles_sm80.grid(size)
    dense = torch.zeros(tall * 32, wide * 64, dtype=torch.float16)
    for tile, (begin, end) in enumerate(itertools.pairwise(pattern.starts.tolist())):
        for first in range(begin, end, 32):
            lanes = min(end - first, 32)
            for lane, slot in itertools.product(range(lanes), range(4)):
                place = int(pattern.places[4 * (first + lane) + slot]) & 0xFFFF
                if place & 1:
                    continue
                source = 4 * (first - begin) + slot * lanes + lane + int(pattern.shifts[tile, place >> 11])
                row, column = where[place & 0xFFE]
                dense[tile // wide * 32 + row, tile % wide * 64 + column] = values[source]
    assert torch.equal(dense[: size[0], : size[1]], w)


def _where(rows, columns):
    return _weight_tiles_sm80.place(rows, columns), rows, columns


def test_what_has_no_pattern(device, normal, sparse, to_numpy, assert_close):
    """Columns that repeat or fall, and next to no entries: others multiply."""
    offsets = torch.tensor([0, 3], dtype=torch.int32, device=device)
    for cols in ([1, 1, 2], [2, 1, 5]):
        cols = torch.tensor(cols, dtype=torch.int32, device=device)
        assert _spmm_few_sm80.pattern(cols, offsets, (1, 6)) is None
        values = torch.ones(3, dtype=torch.float16, device=device)
        x = normal(5, 6, dtype=torch.float16, device=device)
        plan = kernels.spmm_csr.plan(cols, offsets, shape=(1, 6))
        y = kernels.spmm_csr(x, values, cols, offsets, shape=(1, 6), plan=plan)
        assert_close(y, to_numpy(x)[:, cols.cpu().numpy()].sum(axis=1, keepdims=True))
    w = sparse(500, 500, 0.001, torch.float16)
    assert _spmm_few_sm80.pattern(*csr_of(w, device)[1:], w.shape) is None


@pytest.mark.gpu
def test_the_pattern_is_found_when_it_is_wanted(normal, sparse):
    w = sparse(40, 300, 0.3, torch.float16)
    csr = csr_of(w, torch.device("cuda", 0))
    plan = kernels.spmm_csr.plan(*csr[1:], shape=w.shape)
    kernels.spmm_csr(normal(9, 300, device="cuda"), csr[0].float(), *csr[1:], shape=w.shape, plan=plan)
    assert plan.few is None
    kernels.spmm_csr(normal(9, 300, dtype=torch.float16, device="cuda"), *csr, shape=w.shape, plan=plan)
    assert isinstance(plan.few, _spmm_few_sm80.Pattern)


@pytest.mark.parametrize("capability", [(132, 227 * 1024), (108, 163 * 1024), (84, 99 * 1024)])
def test_every_product_is_divided_within_the_limits(capability):
    sizes = itertools.product((1, 8, 20, 64), (1, 10, 256, 16384), (1, 784, 4096, 16384, 100_000))
    for m, n, k in sizes:
        division = _weight_tiles_sm80.choose(m, n, k, _spmm_few_sm80.DIVISIONS, *capability)
        assert (division is None) == (k == 100_000)
        assert division is None or division.fits(k, capability[1])


def test_few_blocks_share_the_batch_among_them():
    """So that a small layer has blocks enough; a large one would have waves of them."""
    limits = 132, 227 * 1024
    assert _weight_tiles_sm80.choose(64, 1024, 784, _spmm_few_sm80.DIVISIONS, *limits).batch == 16
    assert _weight_tiles_sm80.choose(64, 4096, 4096, _spmm_few_sm80.DIVISIONS, *limits).batch == 32


@pytest.mark.parametrize("values", [(7, 16), (8, 3), (64, 16)])
def test_a_division_is_checked(values):
    with pytest.raises(ValueError, match="not a division"):
        _weight_tiles_sm80.Division(*values)
