"""The sampled product against the oracle: the gradient of sparse weights at their entries."""

import numpy as np
import pytest
import scipy.sparse
import torch

from qsparse import kernels
from qsparse.kernels import _sddmm_sm80
from qsparse.oracles.sddmm import sddmm as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN = float("nan")


def pattern(w: torch.Tensor, device, index=torch.int32) -> tuple[torch.Tensor, torch.Tensor]:
    """Column indices and row offsets of a dense matrix."""
    csr = scipy.sparse.csr_array(w.double().numpy())
    cols, offsets = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (csr.indices, csr.indptr))
    return cols.to(index), offsets


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (33, 65), (10, 200)], ids=str)
def test_matches_the_oracle(device, dtype, size, normal, sparse, to_numpy, assert_close):
    for density in (0.0, 0.1, 1.0):
        w = pattern(sparse(*size, density), device)
        for m in (0, 1, 7, 64, 300):
            dy, x = (normal(m, width, dtype=dtype, device=device) for width in size)
            out = kernels.sddmm(dy, x, *w)
            assert out.dtype == dtype
            assert out.device == device
            assert_close(out, oracle(to_numpy(dy), to_numpy(x), *to_numpy(w)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("index", [torch.int32, torch.uint16], ids=str)
@pytest.mark.parametrize(("m", "size"), [(300, (300, 500)), (128, (500, 784)), (1001, (257, 130))], ids=str)
def test_larger_shapes_with_a_plan(device, dtype, index, m, size, normal, sparse, to_numpy, assert_close):
    cols, offsets = pattern(sparse(*size, 0.1), device, index)
    dy, x = (normal(m, width, dtype=dtype, device=device) for width in size)
    n, k = np.repeat(np.arange(size[0]), np.diff(to_numpy(offsets))), cols.int().cpu().numpy()
    reference = (to_numpy(dy).T @ to_numpy(x))[n, k]
    plan = kernels.spmm_csr.plan(cols, offsets, shape=size)
    assert_close(kernels.sddmm(dy, x, cols, offsets), reference)
    assert_close(kernels.sddmm(dy, x, cols, offsets, check=False, plan=plan), reference)


def test_case_12_views(device, normal, sparse, to_numpy, assert_close):
    w, wide = pattern(sparse(20, 31, 0.3), device), normal(80, 80, device=device)
    dy = normal(40, 40, device=device)
    for x in (wide[:40, :31], wide[:31, :40].t(), wide[::2, ::2][:, :31], wide[:1, :31].expand(40, -1)):
        for grad in (dy[:, :20], dy.t()[:, :20], dy[:, ::2], dy[:1, :20].expand(40, -1)):
            assert_close(kernels.sddmm(grad, x, *w), oracle(to_numpy(grad), to_numpy(x), *to_numpy(w)))


def test_unsorted_columns_duplicates_and_long_rows(device, normal, to_numpy, assert_close):
    generator = torch.Generator().manual_seed(4)
    lengths = [5, 3000, 0, 2500, 1]
    cols = torch.randint(0, 700, (sum(lengths),), generator=generator, dtype=torch.int32)
    cols[5:3005] = cols[5:3005].sort().values
    offsets = torch.tensor([0, *lengths]).cumsum(0).int()
    dy, x = normal(50, 5, device=device), normal(50, 700, device=device)
    out = kernels.sddmm(dy, x, cols.to(device), offsets.to(device))
    assert_close(out, oracle(to_numpy(dy), to_numpy(x), *to_numpy((cols, offsets))))
    assert torch.equal(kernels.sddmm(dy, x, cols.to(device), offsets.to(device)), out)


def test_case_9_nan_reaches_its_own_entries(device, normal, sparse):
    w = sparse(30, 40, 0.3)
    cols, offsets = pattern(w, device)
    dy, x = normal(20, 30, device=device), normal(20, 40, device=device)
    x[3, 5] = NAN
    out = kernels.sddmm(dy, x, cols, offsets)
    assert torch.equal(out.isnan(), cols == 5)


def test_refuses_what_does_not_fit(device, normal, sparse):
    cols, offsets = pattern(sparse(5, 6, 0.5), device)
    dy, x = normal(4, 5, device=device), normal(4, 6, device=device)
    with pytest.raises(TypeError, match=r"^dy must be float32, float16, bfloat16, got float64"):
        kernels.sddmm(dy.double(), x, cols, offsets)
    with pytest.raises(TypeError, match=r"^x must be float32, got float16"):
        kernels.sddmm(dy, x.half(), cols, offsets)
    with pytest.raises(ValueError, match=r"^x must have shape \(4, any\), got \(3, 6\)"):
        kernels.sddmm(dy, x[:3], cols, offsets)
    with pytest.raises(ValueError, match=r"^row_offsets must have shape \(6,\), got \(5,\)"):
        kernels.sddmm(dy, x, cols, offsets[1:])
    with pytest.raises(ValueError, match=r"^col_indices\[0\] is 6, outside \[0, 6\)"):
        kernels.sddmm(dy, x, torch.full_like(cols, 6), offsets)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    ("size", "density"),
    [((1, 1), 1.0), ((5, 7), 0.5), ((300, 500), 0.1), ((10_001, 300), 1e-4), ((1, 3000), 1.0), ((2000, 784), 4e-3)],
    ids=str,
)
def test_few_rows_of_any_pattern(dtype, size, density, normal, sparse, to_numpy, assert_close):
    """Shares that begin and end anywhere in rows of W: long, short and empty ones, and a dense one among empty ones."""
    device = torch.device("cuda", 0)
    w = sparse(*size, density)
    w[len(w) // 2] = 1
    n = np.nonzero(to_numpy(w))[0]
    for index, m in ((torch.int32, 1), (torch.uint16, 8), (torch.int32, 9), (torch.uint16, 16)):
        cols, offsets = pattern(w, device, index)
        dy, x = (normal(m, width, dtype=dtype, device=device) for width in size)
        reference = (to_numpy(dy).T @ to_numpy(x))[n, cols.int().cpu().numpy()]
        assert_close(_sddmm_sm80.run_few(dy, x, cols, offsets), reference)
        turned = dy.t().contiguous().t(), x.t().contiguous().t()
        assert_close(_sddmm_sm80.run_few(*turned, cols, offsets), reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_few_rows_among_hundreds_of_thousands_of_empty_ones(dtype, normal, to_numpy, assert_close):
    """The way to a warp's first row, and from one to the next over any number of empty ones."""
    device, size, cols = torch.device("cuda", 0), 200_000, [3, 90]
    dy, x = (normal(16, width, dtype=dtype, device=device) for width in (size, 100))
    for rows in ([100_001, 199_999], [0, 199_999], [0, 64], [31, 32], [150_000, 150_000], [1, 100_000]):
        offsets = torch.searchsorted(torch.tensor(rows), torch.arange(size + 1)).int().to(device)
        for m in (1, 16):
            reference = (to_numpy(dy[:m, rows]) * to_numpy(x[:m, cols])).sum(axis=0)
            out = _sddmm_sm80.run_few(dy[:m], x[:m], torch.tensor(cols, dtype=torch.int32, device=device), offsets)
            assert_close(out, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_division(dtype, normal, sparse, to_numpy, assert_close):
    """Slabs of the batch in turn and side by side, slices of the columns, tiles; rows in parts and in no order."""
    device = torch.device("cuda", 0)
    for k, slices in ((300, 1), (301, 1), (2500, 8)):
        w = sparse(90, k, 0.1)
        w[1], w[2] = 1, 0
        cols, offsets = pattern(w, device)
        third = slice(int(offsets[3]), int(offsets[4]))
        cols[third] = cols[third].flip(0)
        n = np.repeat(np.arange(90), np.diff(to_numpy(offsets)))
        plan = kernels.spmm_csr.plan(cols, offsets, shape=w.shape)
        for m, steps, known, index in (
            (300, 2, None, torch.int32),
            (65, 9, plan, torch.int32),
            (40, 1, None, torch.uint16),
        ):
            dy, x = (normal(m, width, dtype=dtype, device=device) for width in (90, k))
            reference = (to_numpy(dy).T @ to_numpy(x))[n, cols.cpu().numpy()]
            choice = _sddmm_sm80.Slabs(37, slices, steps)
            assert choice.shared(k) <= 222 * 1024
            arrays = (dy, x, cols.to(index), offsets, known)
            assert_close(_sddmm_sm80.run_slabs(choice, *arrays), reference)
            assert_close(_sddmm_sm80.run_tiles(50, *arrays), reference)
            turned = (dy.t().contiguous().t(), x.t().contiguous().t(), *arrays[2:])
            assert_close(_sddmm_sm80.run_slabs(choice, *turned), reference)


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
def test_every_choice_of_slabs_fits_the_card(kilobytes):
    budget = kilobytes * 1024 - 12288
    for itemsize in (2, 4):
        for m, n, k, nnz in ((1, 1, 1, 1), (64, 4096, 4096, 10**6), (60000, 256, 784, 20000), (20, 10**5, 40, 5000)):
            choice = _sddmm_sm80.choose_slabs(m, n, k, nnz, itemsize, budget, 132)
            if choice:
                assert choice.shared(k) <= budget
                assert choice.ranges(m, itemsize) * choice.steps * 32 * 8 // itemsize >= m
            else:
                assert k == 4096
