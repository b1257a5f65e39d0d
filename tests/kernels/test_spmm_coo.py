"""COO weights times activations, against the oracle and SciPy: any order, duplicates summed."""

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse import kernels
from qsparse.oracles.spmm_coo import spmm_coo as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
BATCHES = [0, 1, 8, 16, 17, 100]  # on a GPU the small kernel up to 16 rows, beyond it the tiles


def to_coo(w: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, rows and columns of a dense matrix, row by row."""
    rows, cols = w.nonzero(as_tuple=True)
    return w[rows, cols].to(device), rows.int().to(device), cols.int().to(device)


def shuffled(coo):
    order = torch.randperm(len(coo[0]), generator=torch.Generator().manual_seed(3)).to(coo[0].device)
    return tuple(array[order] for array in coo)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (32, 33), (65, 100), (10, 784)], ids=str)
def test_case_16_matches_the_oracle(device, dtype, size, normal, sparse, to_numpy, assert_close):
    for density in (0.0, 0.1, 1.0):
        coo = to_coo(sparse(*size, density, dtype), device)
        x = normal(max(BATCHES), size[1], dtype=dtype, device=device)
        reference = oracle(to_numpy(x), *to_numpy(coo), shape=size)
        for m in BATCHES:
            y = kernels.spmm_coo(x[:m], *coo, shape=size)
            assert y.dtype == dtype
            assert y.device == device
            assert y.is_contiguous()
            assert_close(y, reference[:m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 300])
def test_matches_scipy_with_bias_and_relu(device, dtype, m, normal, sparse, to_numpy, assert_close):
    w = sparse(257, 519, 0.1, dtype)
    coo, x, bias = (
        to_coo(w, device),
        normal(m, 519, dtype=dtype, device=device),
        normal(257, dtype=dtype, device=device),
    )
    reference = (scipy.sparse.coo_array(to_numpy(w)) @ to_numpy(x).T).T + to_numpy(bias)
    assert_close(kernels.spmm_coo(x, *coo, bias, shape=w.shape), reference)
    assert_close(kernels.spmm_coo(x, *coo, bias, shape=w.shape, relu=True, ordered=True), reference.clip(min=0))


@pytest.mark.parametrize("m", [1, 9, 40])
def test_case_14_unsorted_with_duplicates_is_summed(device, m, normal, integers, to_numpy, assert_close):
    nnz, n, k = 3000, 30, 20  # about five entries at each place
    rows, cols = (integers(0, size, nnz, dtype=torch.int32, device=device) for size in (n, k))
    coo, x = (normal(nnz, device=device), rows, cols), normal(m, k, device=device)
    y = kernels.spmm_coo(x, *coo, shape=(n, k))
    assert_close(y, oracle(to_numpy(x), *to_numpy(coo), shape=(n, k)))
    assert torch.equal(y, kernels.spmm_coo(x, *coo, shape=(n, k)))  # no atomics: the same bits again


@pytest.mark.parametrize("m", [1, 40])
def test_any_order_of_the_same_entries(device, m, normal, sparse, to_numpy, assert_close):
    w = sparse(50, 60, 0.4)
    coo, x = to_coo(w, device), normal(m, 60, device=device)
    for arrays in (shuffled(coo), tuple(array.flip(0) for array in coo), to_coo(w.t(), device)):
        values, rows, cols = arrays
        if arrays[1].max() >= 50:
            rows, cols = cols, rows  # W column by column
        assert_close(kernels.spmm_coo(x, values, rows, cols, shape=w.shape), to_numpy(x) @ to_numpy(w).T)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (5, 7)], ids=str)
@pytest.mark.parametrize("ordered", [False, True])
def test_case_13_nothing_stored(device, size, ordered, normal):
    n, k = size
    bias, coo = normal(n, device=device), to_coo(torch.zeros(1, 1), device)
    options = {"shape": size, "ordered": ordered}
    for m in BATCHES:
        x = normal(m, k, device=device)
        assert torch.equal(kernels.spmm_coo(x, *coo, **options), torch.zeros(m, n, device=device))
        assert torch.equal(kernels.spmm_coo(x, *coo, bias, **options), bias.expand(m, n))
        assert torch.equal(kernels.spmm_coo(x, *coo, bias, relu=True, **options), bias.relu().expand(m, n))


@pytest.mark.parametrize("m", [1, 40])
def test_one_dense_row_among_ten_thousand_empty_ones(device, m, normal, to_numpy, assert_close):
    w = torch.zeros(10_001, 300)
    w[7000] = normal(300).abs()
    x = normal(m, 300, device=device).abs()  # nothing cancels in the only output
    y = kernels.spmm_coo(x, *shuffled(to_coo(w, device)), shape=w.shape)
    assert_close(y[:, 7000], to_numpy(x) @ to_numpy(w[7000]))
    y[:, 7000] = 0
    assert (y == 0).all()


@pytest.mark.parametrize("m", [1, 40])
def test_a_single_column(device, m, normal, sparse, to_numpy, assert_close):
    w, x = sparse(500, 1, 0.3), normal(m, 1, device=device)
    assert_close(kernels.spmm_coo(x, *to_coo(w, device), shape=w.shape), to_numpy(x) @ to_numpy(w).T)


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_case_9_what_is_not_finite_meets_stored_entries_only(device, m, value, sparse, normal):
    w = sparse(50, 40, 0.3)
    coo, x = to_coo(w, device), normal(m, 40, device=device)
    clean = kernels.spmm_coo(x, *coo, shape=w.shape)
    x[1, 5] = value
    y = kernels.spmm_coo(x, *coo, shape=w.shape)
    touched = torch.zeros(m, 50, dtype=torch.bool)
    touched[1] = w[:, 5] != 0
    assert torch.equal(y.isfinite().cpu(), ~touched)
    assert torch.equal(y.cpu()[~touched], clean.cpu()[~touched])


@pytest.mark.parametrize("m", [2, 20])
def test_a_stored_zero_is_multiplied(device, m):
    """What is stored counts, also a zero: 0 * NaN is NaN. A NaN among the values reaches its row of W alone."""
    coo = to_coo(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), device)
    coo[0][:] = torch.tensor([0.0, 2.0, NAN, 1.0])
    y = kernels.spmm_coo(torch.ones(m, 2, device=device), *coo, shape=(2, 2), relu=True)
    assert (y[:, 0] == 2).all()
    assert y[:, 1].isnan().all()
    x = torch.tensor([NAN, 1.0], device=device).expand(m, 2)
    assert kernels.spmm_coo(x, *coo, shape=(2, 2)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("ordered", [False, True])
def test_case_12_views(device, dtype, ordered, normal, sparse, to_numpy, assert_close):
    w = sparse(20, 31, 0.3, dtype)
    coo = tuple(torch.stack((array, array), 1)[:, 1] for array in to_coo(w, device))
    wide, bias = normal(62, 62, dtype=dtype, device=device), normal(40, dtype=dtype, device=device)[::2]
    for m in (4, 31):
        for x in (
            wide[:m, :31],
            wide[:31, :m].t(),
            wide[: 2 * m : 2, ::2],
            wide.flip(1)[:m, :31],
            wide[:1, :31].expand(m, -1),
            wide[:m, :1].expand(-1, 31),
        ):
            reference = to_numpy(x) @ to_numpy(w).T + to_numpy(bias)
            assert_close(kernels.spmm_coo(x, *coo, bias, shape=w.shape, ordered=ordered), reference)


def test_sums_are_held_in_float32(device):
    """In float16 the running sum would stop at 2048, where 1 is below half an ulp."""
    coo = to_coo(torch.ones(1, 4096, dtype=torch.float16), device)
    for m in (1, 9):
        x = torch.ones(m, 4096, dtype=torch.float16, device=device)
        assert (kernels.spmm_coo(x, *coo, shape=(1, 4096)) == 4096).all()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    m=st.integers(0, 12), n=st.integers(1, 12), k=st.integers(1, 12), nnz=st.integers(0, 60), seed=st.integers(0, 99)
)
def test_any_shape_on_the_cpu(m, n, k, nnz, seed):
    generator = np.random.default_rng(seed)
    values, x = (generator.standard_normal(size).astype(np.float32) for size in (nnz, (m, k)))
    rows, cols = (generator.integers(0, size, nnz, dtype=np.int32) for size in (n, k))
    y = kernels.spmm_coo(x, values, rows, cols, shape=(n, k))
    assert y.shape == (m, n)
    assert (np.abs(y - oracle(x, values, rows, cols, shape=(n, k))) < 1e-4).all()


@pytest.mark.parametrize("m", [0, 3])
@pytest.mark.parametrize("ordered", [False, True])
def test_case_15_bad_indices_are_named(device, m, ordered, normal):
    x, values = normal(m, 4, device=device), normal(3, device=device)

    def spmm(rows, cols):
        indices = (torch.tensor(a, dtype=torch.int32, device=device) for a in (rows, cols))
        return kernels.spmm_coo(x, values, *indices, shape=(2, 4), ordered=ordered)

    spmm([0, 1, 1], [3, 0, 1])
    with pytest.raises(ValueError, match=r"^rows\[2\] is 2, outside \[0, 2\)"):
        spmm([0, 1, 2], [0, 1, 2])
    with pytest.raises(ValueError, match=r"^rows\[0\] is -1, outside \[0, 2\)"):
        spmm([-1, 1, 1], [0, 1, 2])
    with pytest.raises(ValueError, match=r"^cols\[1\] is 4, outside \[0, 4\)"):
        spmm([0, 1, 1], [0, 4, 9])
    with pytest.raises(ValueError, match=r"^cols\[2\] is -1, outside \[0, 4\)"):
        spmm([0, 1, 1], [0, 1, -1])


def test_refuses_what_does_not_fit(device, normal, sparse):
    w = sparse(5, 6, 0.5)
    values, rows, cols = to_coo(w, device)
    x = normal(4, 6, device=device)
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got float64"):
        kernels.spmm_coo(x.double(), values, rows, cols, shape=w.shape)
    with pytest.raises(TypeError, match=r"^values must be float32, got float16"):
        kernels.spmm_coo(x, values.half(), rows, cols, shape=w.shape)
    with pytest.raises(TypeError, match=r"^rows must be int32, got int64"):
        kernels.spmm_coo(x, values, rows.long(), cols, shape=w.shape)
    with pytest.raises(TypeError, match=r"^cols must be int32, got int64"):
        kernels.spmm_coo(x, values, rows, cols.long(), shape=w.shape)
    with pytest.raises(ValueError, match=r"^rows must have shape"):
        kernels.spmm_coo(x, values, rows[1:], cols, shape=w.shape)
    with pytest.raises(ValueError, match=r"^cols must have shape"):
        kernels.spmm_coo(x, values, rows, cols[:, None], shape=w.shape)
    with pytest.raises(ValueError, match=r"^shape must be \(N, 6\) to fit x, got \(5, 7\)"):
        kernels.spmm_coo(x, values, rows, cols, shape=(5, 7))
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(4,\)"):
        kernels.spmm_coo(x, values, rows, cols, x[:, 0], shape=w.shape)
