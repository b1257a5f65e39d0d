"""CSR weights times activations, against the oracle and SciPy."""

import struct

import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse import kernels
from qsparse.kernels import _spmm_expand_sm90, _spmm_groups_sm90, _spmm_slab_sm90, _spmm_sm80
from qsparse.kernels._load import launched
from qsparse.oracles.spmm_csr import spmm_csr as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")
BATCHES = [0, 1, 4, 8, 16, 17, 100]  # on a GPU the small kernel up to 16 rows, beyond it the tiles


def to_csr(w: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, column indices and row offsets of a dense matrix."""
    csr = scipy.sparse.csr_array(w.double().numpy())
    indices = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (csr.indices, csr.indptr))
    return torch.from_numpy(csr.data).to(device, w.dtype), *indices


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (32, 33), (65, 100), (10, 784)], ids=str)
def test_case_16_matches_the_oracle(device, dtype, size, normal, sparse, to_numpy, assert_close):
    for density in (0.0, 0.1, 1.0):
        csr = to_csr(sparse(*size, density, dtype), device)
        x = normal(max(BATCHES), size[1], dtype=dtype, device=device)
        reference = oracle(to_numpy(x), *to_numpy(csr), shape=size)
        for m in BATCHES:
            y = kernels.spmm_csr(x[:m], *csr, shape=size)
            assert y.dtype == dtype
            assert y.device == device
            assert y.is_contiguous()
            assert_close(y, reference[:m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 300])
def test_matches_scipy_with_bias_and_relu(device, dtype, m, normal, sparse, to_numpy, assert_close):
    w = sparse(257, 519, 0.1, dtype)
    csr, x, bias = (
        to_csr(w, device),
        normal(m, 519, dtype=dtype, device=device),
        normal(257, dtype=dtype, device=device),
    )
    reference = (scipy.sparse.csr_array(to_numpy(w)) @ to_numpy(x).T).T + to_numpy(bias)
    assert_close(kernels.spmm_csr(x, *csr, bias, shape=w.shape), reference)
    assert_close(kernels.spmm_csr(x, *csr, bias, shape=w.shape, relu=True), reference.clip(min=0))


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (5, 7)], ids=str)
def test_case_13_nothing_stored(device, size, normal):
    n, k = size
    bias = normal(n, device=device)
    csr = *to_csr(torch.zeros(0, 1), device)[:2], torch.zeros(n + 1, dtype=torch.int32, device=device)
    for m in BATCHES:
        x = normal(m, k, device=device)
        assert torch.equal(kernels.spmm_csr(x, *csr, shape=size), torch.zeros(m, n, device=device))
        assert torch.equal(kernels.spmm_csr(x, *csr, bias, shape=size), bias.expand(m, n))
        assert torch.equal(kernels.spmm_csr(x, *csr, bias, shape=size, relu=True), bias.relu().expand(m, n))


@pytest.mark.parametrize("m", [1, 40])
def test_one_dense_row_among_ten_thousand_empty_ones(device, m, normal, to_numpy, assert_close):
    w = torch.zeros(10_001, 300)
    w[7000] = normal(300).abs()
    x = normal(m, 300, device=device).abs()  # nothing cancels in the only output
    y = kernels.spmm_csr(x, *to_csr(w, device), shape=w.shape)
    assert_close(y[:, 7000], to_numpy(x) @ to_numpy(w[7000]))
    y[:, 7000] = 0
    assert (y == 0).all()


@pytest.mark.parametrize("m", [1, 40])
def test_a_single_column(device, m, normal, sparse, to_numpy, assert_close):
    for w in (sparse(500, 1, 0.3), normal(1, 500).t()):
        x = normal(m, 1, device=device)
        assert_close(kernels.spmm_csr(x, *to_csr(w, device), shape=w.shape), to_numpy(x) @ to_numpy(w).T)


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("dtype", DTYPES)
def test_unsorted_columns_and_duplicates_are_summed(device, m, dtype, normal, to_numpy, assert_close):
    col_indices = torch.tensor([5, 0, 5, 5, 3, 3, 1], dtype=torch.int32, device=device)
    row_offsets = torch.tensor([0, 4, 4, 7], dtype=torch.int32, device=device)
    csr = normal(7, dtype=dtype, device=device), col_indices, row_offsets
    x = normal(m, 6, dtype=dtype, device=device)
    assert_close(kernels.spmm_csr(x, *csr, shape=(3, 6)), oracle(to_numpy(x), *to_numpy(csr), shape=(3, 6)))


@pytest.mark.parametrize("m", [2, 20])
@pytest.mark.parametrize("value", [NAN, INF, -INF])
@pytest.mark.parametrize("dtype", DTYPES)
def test_case_9_what_is_not_finite_meets_stored_entries_only(
    device, m, value, dtype, sparse, normal, to_numpy, assert_close
):
    w = sparse(50, 40, 0.3, dtype)
    csr, x, bias = to_csr(w, device), normal(m, 40, dtype=dtype, device=device), normal(50, dtype=dtype, device=device)
    clean = kernels.spmm_csr(x, *csr, bias, shape=w.shape)
    x[1, 5] = value
    y = kernels.spmm_csr(x, *csr, bias, shape=w.shape)
    touched = torch.zeros(m, 50, dtype=torch.bool, device=device)
    touched[1] = w[:, 5].to(device) != 0
    assert torch.equal(y.isfinite(), ~touched)
    if dtype == torch.float32:
        assert torch.equal(y[~touched], clean[~touched])
    assert_close(y[~touched], to_numpy(clean[~touched]))
    assert (kernels.spmm_csr(x, *csr, bias, shape=w.shape, relu=True).isnan() == y.isnan()).all()


@pytest.mark.parametrize("m", [2, 20])
def test_a_stored_zero_is_multiplied(device, m):
    """What is stored counts, also a zero: 0 * NaN is NaN. A NaN among the values reaches its row of W alone."""
    csr = to_csr(torch.tensor([[1.0, 1.0], [1.0, 1.0]]), device)
    csr[0][:] = torch.tensor([0.0, 2.0, NAN, 1.0])
    y = kernels.spmm_csr(torch.ones(m, 2, device=device), *csr, shape=(2, 2), relu=True)
    assert (y[:, 0] == 2).all()
    assert y[:, 1].isnan().all()
    x = torch.tensor([NAN, 1.0], device=device).expand(m, 2)
    assert kernels.spmm_csr(x, *csr, shape=(2, 2)).isnan().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_12_views(device, dtype, normal, sparse, to_numpy, assert_close):
    w = sparse(20, 31, 0.3, dtype)
    values, col_indices, row_offsets = to_csr(w, device)
    wide = normal(62, 62, dtype=dtype, device=device)
    stretched = torch.stack((values, values), 1)[:, 0], torch.stack((col_indices, col_indices), 1)[:, 1], row_offsets
    bias = normal(40, dtype=dtype, device=device)[::2]
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
            assert_close(kernels.spmm_csr(x, *stretched, bias, shape=w.shape), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(300, 1000), (1000, 203), (257, 64)], ids=str)
def test_tiles_plans_and_indices(device, dtype, size, normal, sparse, to_numpy, assert_close):
    """Several slabs, blocks of rows and of the batch; with a plan and without; both types of indices."""
    w = sparse(*size, 0.1, dtype)
    values, col_indices, row_offsets = to_csr(w, device)
    x, bias = normal(300, size[1], dtype=dtype, device=device), normal(size[0], dtype=dtype, device=device)
    reference = (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0)
    for columns in (col_indices, col_indices.to(torch.uint16)):
        plan = kernels.spmm_csr.plan(columns, row_offsets, shape=size)
        for m in (5, 40, 200, 300):
            for known in (None, plan):
                y = kernels.spmm_csr(x[:m], values, columns, row_offsets, bias, shape=size, relu=True, plan=known)
                assert_close(y, reference[:m])


@pytest.mark.parametrize("dtype", DTYPES)
def test_w_times_x_column_major(device, dtype, normal, sparse, to_numpy, assert_close):
    w, bias = sparse(70, 150, 0.2, dtype), normal(70, dtype=dtype, device=device)
    for m in (1, 7, 40, 256, 301):
        x = normal(150, m, dtype=dtype, device=device)
        y = kernels.spmm_csr(x.t(), *to_csr(w, device), bias, shape=w.shape, columns=True).t()
        assert y.shape == (70, m)
        assert y.is_contiguous()
        assert_close(y, to_numpy(w) @ to_numpy(x) + to_numpy(bias)[:, None])


@pytest.mark.parametrize("columns", [False, True])
@pytest.mark.parametrize("precision", ["ieee", "highest"])
@pytest.mark.parametrize("size", [(140, 200), (700, 701)], ids=str)
def test_w_written_out(device, size, precision, columns, normal, sparse, to_numpy, assert_close, monkeypatch):
    """By a dense product too, what is not finite meets stored entries only, and a column may repeat."""
    w, bias = sparse(*size, 0.3), normal(size[0], device=device)
    values, cols, offsets = to_csr(w, device)
    x = normal(260, size[1], device=device)
    options = {"shape": size, "precision": precision, "columns": columns}

    def by_dense(*bias):
        monkeypatch.setattr(_spmm_expand_sm90, "time", lambda *_: -1e9)
        with launched() as ran:
            y = kernels.spmm_csr(x, values, cols, offsets, *bias, **options)
        if device.type == "cuda" and torch.cuda.get_device_capability(device) == (9, 0):
            by = {name.partition(":")[0] for name in ran if name.startswith("gemm")}
            assert by == {"gemm_simt.cu"} or (by and precision == "highest")
        return y

    y = by_dense(bias)
    assert y.t().is_contiguous() if columns else y.is_contiguous()
    assert_close(y, to_numpy(x) @ to_numpy(w).T + to_numpy(bias))
    x[1, 5], x[200, 6], cols[1] = NAN, INF, cols[0]
    dense = by_dense()
    monkeypatch.setattr(_spmm_expand_sm90, "time", lambda *_: INF)
    by_entries = kernels.spmm_csr(x, values, cols, offsets, **options)
    assert torch.equal(dense.isfinite(), by_entries.isfinite())
    finite = by_entries.isfinite()
    assert_close(dense[finite], to_numpy(by_entries[finite]))
    with pytest.raises(ValueError, match=r"^precision must be one of ieee, highest, got .high"):
        kernels.spmm_csr(x, values, cols, offsets, **{**options, "precision": "high"})


@pytest.mark.parametrize("m", [3, 300])
@pytest.mark.parametrize("ascending", [True, False])
def test_long_rows_among_short_ones(device, m, ascending, normal, to_numpy, assert_close):
    """A few dense rows, in any order of columns too, the others nearly empty."""
    k, lengths = 5000, [3, 5000, 0, 1, 4999, 2, 2600] + [1] * 100
    generator = torch.Generator().manual_seed(5)
    rows = [torch.randperm(k, generator=generator)[:length] for length in lengths]
    col_indices = torch.cat([row.sort().values if ascending or len(row) < 5000 else row for row in rows])
    row_offsets = torch.tensor([0, *lengths]).cumsum(0).int().to(device)
    values, x = normal(len(col_indices)), normal(m, k, device=device)
    csr = values.to(device), col_indices.int().to(device), row_offsets
    w = scipy.sparse.csr_array((to_numpy(values), col_indices.numpy(), to_numpy(row_offsets)), shape=(len(rows), k))
    bias = normal(len(rows), device=device)
    reference = (w @ to_numpy(x).T).T + to_numpy(bias)
    for plan in (None, kernels.spmm_csr.plan(*csr[1:], shape=w.shape)):  # with one, another kernel may be faster
        y = kernels.spmm_csr(x, *csr, bias, shape=w.shape, plan=plan)
        assert_close(y, reference)
        assert torch.equal(kernels.spmm_csr(x, *csr, bias, shape=w.shape, plan=plan), y)


def test_a_plan_of_other_arrays_is_refused(device, normal, sparse):
    csr = to_csr(sparse(20, 30, 0.3), device)
    if (plan := kernels.spmm_csr.plan(*csr[1:], shape=(20, 30))) is None:
        pytest.skip("a CPU needs no plan")
    with pytest.raises(ValueError, match=r"^plan was made for other"):
        kernels.spmm_csr(normal(4, 30, device=device), csr[0], csr[1].clone(), csr[2], shape=(20, 30), plan=plan)


def test_a_plan_fits_the_very_arrays_however_they_lie(monkeypatch):
    monkeypatch.setattr(_spmm_sm80, "launch", lambda *args, **options: None)  # what is found is not looked at
    both = torch.tensor([[0, 9], [2, 9], [1, 9]], dtype=torch.int32)
    cols, row_offsets = both[:, 0], torch.tensor([0, 2, 3], dtype=torch.int32)
    plan = _spmm_sm80.Plan(cols, row_offsets, (2, 3))
    assert plan.fits(cols, row_offsets, (2, 3))
    assert plan.fits(both[:, 0], row_offsets, [2, 3])
    assert plan.cols.tolist() == [0, 2, 1]
    for other in (both[:, 1], cols.clone(), both.view(-1)[:3]):
        assert not plan.fits(other, row_offsets, (2, 3))
    assert not plan.fits(cols, row_offsets, (2, 4))


@pytest.mark.gpu
def test_a_plan_of_strided_indices(normal, sparse):
    w = sparse(40, 30, 0.3)
    values, cols, row_offsets = to_csr(w, "cuda")
    cols, x = torch.stack((cols, cols), dim=1)[:, 0], normal(100, 30, device="cuda")
    plan = kernels.spmm_csr.plan(cols, row_offsets, shape=w.shape)
    y = kernels.spmm_csr(x, values, cols, row_offsets, shape=w.shape, plan=plan)
    assert torch.equal(y, kernels.spmm_csr(x, values, cols, row_offsets, shape=w.shape))


def test_uint16_reaches_65536_columns(device, normal):
    row_offsets = torch.tensor([0, 1], dtype=torch.int32, device=device)
    col_indices = torch.tensor([65535], dtype=torch.int32, device=device).to(torch.uint16)
    for m in (2, 20):
        x = normal(m, 65537, device=device)
        y = kernels.spmm_csr(
            x[:, :65536], normal(1, device=device).fill_(2), col_indices, row_offsets, shape=(1, 65536)
        )
        assert torch.equal(y[:, 0], 2 * x[:, 65535])
        with pytest.raises(ValueError, match=r"^col_indices of uint16 reach 65536 columns, but W has 65537"):
            kernels.spmm_csr(x, x[0, :1], col_indices, row_offsets, shape=(1, 65537))


def test_same_bits_every_run(device, normal, sparse):
    csr = to_csr(sparse(60, 500, 0.5), device)
    for m in (5, 50):
        x = normal(m, 500, device=device)
        first = kernels.spmm_csr(x, *csr, shape=(60, 500))
        assert torch.equal(kernels.spmm_csr(x, *csr, shape=(60, 500)), first)


def test_sums_are_held_in_float32(device):
    """In float16 the running sum would stop at 2048, where 1 is below half an ulp."""
    csr = to_csr(torch.ones(1, 4096, dtype=torch.float16), device)
    for m in (1, 9):
        x = torch.ones(m, 4096, dtype=torch.float16, device=device)
        assert (kernels.spmm_csr(x, *csr, shape=(1, 4096)) == 4096).all()


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(
    m=st.integers(0, 12), n=st.integers(0, 12), k=st.integers(0, 12), density=st.floats(0, 1), seed=st.integers(0, 99)
)
def test_any_shape_on_the_cpu(m, n, k, density, seed):
    generator = np.random.default_rng(seed)
    w = scipy.sparse.random_array((n, k), density=density, format="csr", rng=generator, dtype=np.float32)
    x = generator.standard_normal((m, k)).astype(np.float32)
    csr = w.data, w.indices.astype(np.int32), w.indptr.astype(np.int32)
    y = kernels.spmm_csr(x, *csr, shape=(n, k))
    assert y.shape == (m, n)
    assert (np.abs(y - x.astype(np.float64) @ w.toarray().T) < 1e-5).all()


@pytest.mark.parametrize("m", [0, 3])
def test_case_15_bad_indices_are_named(device, m, normal):
    x, values = normal(m, 4, device=device), normal(3, device=device)

    def spmm(columns, offsets):
        indices = (torch.tensor(a, dtype=torch.int32, device=device) for a in (columns, offsets))
        return kernels.spmm_csr(x, values, *indices, shape=(2, 4))

    spmm([3, 0, 1], [0, 2, 3])
    with pytest.raises(ValueError, match=r"^col_indices\[1\] is 4, outside \[0, 4\)"):
        spmm([0, 4, 9], [0, 2, 3])
    with pytest.raises(ValueError, match=r"^col_indices\[2\] is -1, outside \[0, 4\)"):
        spmm([0, 1, -1], [0, 2, 3])
    with pytest.raises(ValueError, match=r"^row_offsets\[1\] is -1, below row_offsets\[0\]"):
        spmm([0, 1, 2], [0, -1, 3])
    with pytest.raises(ValueError, match=r"^row_offsets\[2\] is 3, below row_offsets\[1\]"):
        spmm([0, 1, 2], [0, 4, 3])
    with pytest.raises(ValueError, match=r"^row_offsets must go from 0 to nnz = 3, got 1 to 3"):
        spmm([0, 1, 2], [1, 2, 3])
    with pytest.raises(ValueError, match=r"^row_offsets must go from 0 to nnz = 3, got 0 to 2"):
        spmm([0, 1, 2], [0, 2, 2])


def test_refuses_what_does_not_fit(device, normal, sparse):
    w = sparse(5, 6, 0.5)
    values, col_indices, row_offsets = to_csr(w, device)
    x = normal(4, 6, device=device)
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got float64"):
        kernels.spmm_csr(x.double(), values, col_indices, row_offsets, shape=w.shape)
    with pytest.raises(TypeError, match=r"^values must be float32, got float16"):
        kernels.spmm_csr(x, values.half(), col_indices, row_offsets, shape=w.shape)
    with pytest.raises(TypeError, match=r"^col_indices must be int32, uint16, got int64"):
        kernels.spmm_csr(x, values, col_indices.long(), row_offsets, shape=w.shape)
    with pytest.raises(TypeError, match=r"^row_offsets must be int32, got int64"):
        kernels.spmm_csr(x, values, col_indices, row_offsets.long(), shape=w.shape)
    with pytest.raises(ValueError, match=r"^col_indices must have shape"):
        kernels.spmm_csr(x, values, col_indices[1:], row_offsets, shape=w.shape)
    with pytest.raises(ValueError, match=r"^row_offsets must have shape \(6,\), got \(5,\)"):
        kernels.spmm_csr(x, values, col_indices, row_offsets[1:], shape=w.shape)
    with pytest.raises(ValueError, match=r"^shape must be \(N, 6\) to fit x, got \(5, 7\)"):
        kernels.spmm_csr(x, values, col_indices, row_offsets, shape=(5, 7))
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(4,\)"):
        kernels.spmm_csr(x, values, col_indices, row_offsets, x[:, 0], shape=w.shape)


@pytest.mark.parametrize("kilobytes", [99, 163, 227])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_tiles_fit_the_card_and_cover_w(kilobytes, itemsize):
    """On every card there is a tile; it fits, and its blocks hold the rows that they are given."""
    budget = kilobytes * 1024 - 4096
    found = _spmm_sm80.tiles(itemsize, budget)
    assert found
    for tile in found:
        assert tile.shared(itemsize) <= budget
        assert 2 <= tile.stages <= 4
        assert tile.width % 64 == 0  # the swizzle's period
    for m, n, k, nnz in ((17, 1, 1, 4), (64, 4096, 4096, 10**6), (60000, 256, 784, 20000), (20, 100_000, 10, 5000)):
        tile, rows = _spmm_sm80.choose(m, n, k, nnz, itemsize, budget, 132)
        assert 1 <= rows <= tile.most_rows(itemsize)
        assert rows * 4 * (tile.batch + 1) <= tile.shared(itemsize)


def test_both_plans_take_a_row_of_any_length(monkeypatch):
    """What is launched with it fits the kernels' arguments."""
    packed = []

    def launch(device, source, instance, formats, arguments, **options):
        packed.append(struct.pack("@" + formats, *arguments))

    for module in (_spmm_sm80, _spmm_groups_sm90):
        monkeypatch.setattr(module, "launch", launch)
    nnz = 2**31 - 1
    cols = torch.zeros(1, dtype=torch.int32, device="meta").expand(nnz)
    offsets = torch.zeros(2, dtype=torch.int32, device="meta")
    monkeypatch.setattr(torch.Tensor, "data_ptr", lambda tensor: 0)
    for plan in (
        _spmm_sm80.Plan(cols, offsets, (1, 100), look=False),
        _spmm_groups_sm90.Plan(cols, offsets, (1, 100), look=False),
    ):
        assert plan.limit == nnz
    assert len(packed) == 5


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_halves_are_multiplied_densely_only_where_the_tensor_cores_take_x(dtype, monkeypatch):
    monkeypatch.setattr(_spmm_sm80, "multiprocessors", lambda device: (9, 132))
    n, k = 1024, 785

    def choice(x, columns=False):
        assert x.shape == (4096, k)
        return _spmm_sm80._hopper_choice(x, n, n * k // 10, None, columns, True)

    wide, tall = torch.empty(4096, 800, dtype=dtype), torch.empty(800, 4104, dtype=dtype)
    for x in (wide[:, :k], wide[:, 8 : k + 8], tall[:k, :4096].t(), tall[:k, 8:4104].t()):
        assert choice(x) == _spmm_sm80.DENSE
        assert choice(x, columns=True) != _spmm_sm80.DENSE
    odd = torch.empty(785, 4097, dtype=dtype)
    for x in (
        torch.empty(4096, k, dtype=dtype),
        wide[:, 1 : k + 1],  # begins between
        odd[:, 1:].t(),
        torch.empty(8192, k, dtype=dtype)[::2],
        torch.empty(4096, 2 * k, dtype=dtype)[:, ::2],  # copied
    ):
        assert choice(x) != _spmm_sm80.DENSE


def uneven(n: int, k: int, dtype, device, normal, sparse):
    """CSR with a full row, an empty one, one whose columns do not ascend and one in which a column repeats; and W."""
    w = sparse(n, k, 0.1, torch.float32)
    w[1], w[2], w[5, :40] = normal(k), 0, 1.5
    values, cols, offsets = to_csr(w.to(dtype), "cpu")
    third, fourth = (slice(int(offsets[r]), int(offsets[r + 1])) for r in (3, 4))
    values[third], cols[third] = values[third].flip(0), cols[third].flip(0)
    cols[fourth.start] = cols[fourth.start + 1]
    rows = np.repeat(np.arange(n), np.diff(offsets.numpy()))
    dense = scipy.sparse.coo_array((values.double().numpy(), (rows, cols.numpy())), shape=(n, k)).toarray()
    return (values.to(device), cols.to(device), offsets.to(device)), dense


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
def test_every_tile(dtype, normal, sparse, to_numpy, assert_close):
    device = torch.device("cuda", 0)
    csr, dense = uneven(90, 3001, dtype, device, normal, sparse)
    x, bias = normal(150, 3001, dtype=dtype, device=device), normal(90, dtype=dtype, device=device)
    reference = (to_numpy(x) @ dense.T + to_numpy(bias)).clip(min=0)
    for tile in _spmm_sm80.tiles(x.element_size(), _spmm_sm80.shared_budget(0)):
        for plan in (None, kernels.spmm_csr.plan(*csr[1:], shape=dense.shape)):
            y = torch.full((150, 90), NAN, dtype=dtype, device=device)
            _spmm_sm80.run_tile(tile, 40, x, *csr, bias, y, True, plan)
            assert_close(y, reference)


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("dtype", "v"), [(torch.float32, 1), (torch.float32, 2), (torch.float16, 2), (torch.bfloat16, 2)]
)
def test_every_slab(dtype, v, normal, sparse, to_numpy, assert_close):
    """Blocks that divide K and such that do not, both directions of x and y, rows in parts and in no order."""
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device)[0] != 9:
        pytest.skip("no Hopper GPU")
    for k, split in ((60, 1), (300, 1), (301, 1), (300, 2), (1101, 2), (1101, 4), (3000, 8)):
        csr, dense = uneven(90, k, dtype, device, normal, sparse)
        bias = normal(90, dtype=dtype, device=device)
        choice = _spmm_slab_sm90.Choice(v, 34, split)
        assert choice.fits(k, dtype.itemsize)
        narrow = csr[0], csr[1].to(torch.uint16), csr[2]
        plan = kernels.spmm_csr.plan(*csr[1:], shape=dense.shape)
        for m, parts, known in ((33, csr, None), (150, csr, plan), (64, narrow, None)):
            x = normal(m, k, dtype=dtype, device=device)
            reference = (to_numpy(x) @ dense.T + to_numpy(bias)).clip(min=0)
            for operand in (x, x.t().contiguous().t(), normal(m, k + 8, dtype=dtype, device=device)[:, :k].copy_(x)):
                for y in (x.new_full((m, 90), NAN), x.new_full((90, m), NAN).t()):
                    _spmm_sm80.run_slab(choice, operand, *parts, bias, y, True, known)
                    assert_close(y, reference)


def test_every_choice_of_slabs_fits_a_hopper_card():
    for itemsize in (2, 4):
        for m, n, k, nnz in ((17, 1, 1, 1), (64, 4096, 4096, 10**6), (60000, 256, 784, 20000), (20, 10**5, 40, 5000)):
            time, choice = _spmm_slab_sm90.choose(m, n, k, nnz, itemsize, 132)
            assert time > 0
            assert 1 <= choice.rows <= 1024
            assert choice.shared(k, itemsize) <= _spmm_slab_sm90.SHARED
            assert (choice.rows - 1) // choice.share < choice.split
            assert choice.split == 1 or choice.width(k) % _spmm_slab_sm90.PLAN_WIDTH == 0
    assert _spmm_slab_sm90.choose(64, 10, 10**6, 10**5, 4, 132)[1] is None


@pytest.mark.gpu
@pytest.mark.parametrize("m", [40, 300])
def test_few_rows_of_w(m, normal, sparse, to_numpy, assert_close):
    """Fewer of them than a block has warps: some share a row out."""
    for n in (1, 2, 3, 7, 16):
        w = sparse(n, 900, 0.7)
        csr = to_csr(w, "cuda")
        x, bias = normal(m, 900, device="cuda"), normal(n, device="cuda")
        with launched() as kernels_run:
            y = kernels.spmm_csr(x, *csr, bias, shape=w.shape)
        if torch.cuda.get_device_capability() >= (8, 0):
            assert [name.partition(":")[0] for name in kernels_run] == [_spmm_sm80.SMALL_SOURCE]
        assert_close(y, to_numpy(x) @ to_numpy(w).T + to_numpy(bias))
