"""CSR weights times a handful of batch rows that a Hopper card's blocks hold whole, against SciPy in float64."""

import numpy as np
import pytest
import scipy.sparse
import torch

from qsparse import kernels
from qsparse.kernels import _spmm_whole_sm90
from qsparse.kernels._load import launched

NAN, INF = float("nan"), float("inf")
DTYPES = [torch.float32, torch.float16, torch.bfloat16]


def uneven(n: int, k: int, density: float, dtype: torch.dtype):
    """CSR with full rows, empty ones, rows whose columns do not ascend and such in which one repeats; and W."""
    generator = np.random.default_rng(7)
    kept = generator.random((n, k)) < density
    kept[::50], kept[1::40] = True, False
    rows, cols = (indices.astype(np.int32) for indices in kept.nonzero())
    offsets = np.concatenate(([0], kept.sum(axis=1).cumsum())).astype(np.int32)
    for row in range(2, n, 30):
        own = slice(offsets[row], offsets[row + 1])
        cols[own] = cols[own][::-1]
        cols[own][:1] = cols[own][-1:]
    values = torch.from_numpy(generator.standard_normal(len(cols))).to(dtype)
    dense = scipy.sparse.coo_array((values.double().numpy(), (rows, cols)), shape=(n, k)).toarray()
    return tuple(a.cuda() for a in (values, torch.from_numpy(cols), torch.from_numpy(offsets))), dense


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 8), (3, 6000), (10, 1024), (513, 8), (700, 784), (1500, 4096)], ids=str)
def test_matches_scipy(dtype, size, normal, to_numpy, assert_close):
    """Rows in one warp and in all of a block, batches that do not fill one, both types of indices."""
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    n, k = size
    (values, cols, offsets), w = uneven(n, k, 0.1, dtype)
    bias = normal(n, dtype=dtype, device="cuda")
    wide = normal(16, k + 16, dtype=dtype, device="cuda")
    for m in (1, 3, 8, 13, 16):
        for x in (wide[:m, :k].contiguous(), wide[:m, 16:], wide[:m, :k].flip(0).contiguous()[-1:].expand(m, -1)):
            reference = (to_numpy(x) @ w.T + to_numpy(bias)).clip(min=0)
            for columns, indices in ((False, cols), (True, cols.to(torch.uint16))):
                options = {"shape": size, "relu": True, "columns": columns}
                with launched() as ran:
                    y = kernels.spmm_csr(x, values, indices, offsets, bias, **options)
                assert [name.partition(":")[0] for name in ran] == [_spmm_whole_sm90.SOURCE]
                assert_close(y, reference)
                assert torch.equal(kernels.spmm_csr(x, values, indices, offsets, bias, **options), y)


@pytest.mark.gpu
def test_what_is_not_finite_meets_stored_entries_only(normal):
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("no Hopper GPU")
    (values, cols, offsets), w = uneven(600, 3000, 0.1, torch.float32)
    x = normal(5, 3000, device="cuda")
    x[1, 0], x[2, 7], x[4, 2999] = NAN, INF, -INF  # column 0 is what absent entries would read
    y = kernels.spmm_csr(x, values, cols, offsets, shape=w.shape)
    stored = torch.zeros(w.shape, dtype=torch.bool, device="cuda")
    stored[torch.repeat_interleave(torch.arange(600, device="cuda"), offsets.diff().long()), cols.long()] = True
    touched = torch.zeros(5, 600, dtype=torch.bool, device="cuda")
    touched[1], touched[2], touched[4] = stored[:, 0], stored[:, 7], stored[:, 2999]
    assert torch.equal(y.isfinite(), ~touched)


def test_takes_rows_of_whole_vectors_that_fit():
    takes = _spmm_whole_sm90.takes
    wide = torch.empty(32, 4100)
    for x in (wide[:8, :4096], wide[:16, 4:], torch.empty(1, 50_000), torch.empty(8, 784, dtype=torch.float16)):
        assert takes(x)
    for x in (wide[:8, 1:4097], wide[:8, :4095], wide[:, :8].t(), torch.empty(8, 0), torch.empty(8, 8000)):
        assert not takes(x)
