"""CSR written out and multiplied on Hopper's tensor cores: each configuration, and what a dense product gets wrong."""

import pytest
import torch

from qsparse.kernels import _spmm_expand_sm90, _spmm_product_sm90
from qsparse.kernels._gemm_sm90_configs import Config, unwalked
from qsparse.sparse import to_csr

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hopper():
    if torch.cuda.get_device_capability() != (9, 0):
        pytest.skip("the copy engine is Hopper's")


def test_every_shape_has_a_configuration_that_is_built():
    def chosen(*size):
        config = _spmm_product_sm90.choose(*size, torch.float16, "NVIDIA H200", 132)
        assert config.suits(*size)
        assert unwalked(config) in _spmm_product_sm90.POSSIBLE
        return config.bm, config.bn, config.cluster

    assert chosen(256, 4096, 4096) == (64, 128, 2)  # the smallest tiles that leave no second round
    assert chosen(2048, 1024, 784) == (128, 128, 2)
    assert chosen(1024, 4096, 1024) == (128, 256, 1)
    assert chosen(60000, 256, 784) == chosen(4096, 4096, 4096) == (128, 256, 2)  # several rounds: two blocks share w
    for size in ((17, 4096, 4096), (64, 10, 7), (65, 10, 7), (100_000, 16, 30_000), (5, 2**20, 64)):
        chosen(*size)


@pytest.mark.parametrize(
    ("size", "blocks"),
    [((4096, 4096), 128), ((4096, 14336), 128), ((60000, 1024), 126), ((60000, 256), 132), ((100, 100), 2)],
)
def test_no_more_blocks_than_their_rounds_need(size, blocks):
    config = Config(128, 256, 2, 4, cm=2)
    assert _spmm_product_sm90.blocks(config, *size, 132) == blocks
    tiles, most = config.tiles(*size), 66
    assert -(-tiles // (blocks // 2)) == -(-tiles // min(tiles, most))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("index", [torch.int32, torch.uint16])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (401, 1001), (4000, 64), (9, 40000)], ids=str)
def test_w_is_written_out(dtype, index, size, sparse):
    """Several rows a warp, rows of several windows, empty and full ones; beyond K zeros."""
    for density in (0.0, 0.02, 0.3, 1.0):
        w = sparse(*size, density, dtype).cuda()
        w[size[0] // 2] = 0
        values, cols, offsets = to_csr(w, w != 0)
        out = _spmm_expand_sm90.expand(values, cols.to(index), offsets, size)
        assert torch.equal(out, w)
        whole = out.as_strided((size[0], out.stride(0)), (out.stride(0), 1))
        assert not whole[:, size[1] :].any()


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", DTYPES)
def test_columns_in_any_order_and_repeated_ones(dtype, sparse):
    w = sparse(70, 1001, 0.9, dtype).cuda()
    values, cols, offsets = to_csr(w, w != 0)
    for row in (3, 50):  # as they come
        entries = slice(int(offsets[row]), int(offsets[row + 1]))
        order = torch.randperm(entries.stop - entries.start, generator=torch.Generator().manual_seed(row)).cuda()
        values[entries], cols[entries] = values[entries][order], cols[entries][order]
    assert torch.equal(_spmm_expand_sm90.expand(values, cols, offsets, w.shape), w)
    pairs = {10: (0, 1), 11: (31, 32), 12: (639, 640), 13: (5, 200), 14: (-2, -1)}
    for row, (i, j) in pairs.items():
        entries = cols[int(offsets[row]) : int(offsets[row + 1])]
        entries[j] = entries[i]
    values[int(offsets[11]) + 31] = values[int(offsets[11]) + 32]  # the same value at the same place
    marked = _spmm_expand_sm90.expand(values, cols, offsets, w.shape).isnan().any(dim=1)
    assert marked.nonzero().flatten().tolist() == list(pairs)


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("ieee", [False, True])
@pytest.mark.parametrize("turned", [False, True])
def test_what_a_dense_product_gets_wrong_shows_before_it(turned, ieee, normal, sparse, to_numpy, assert_close):
    """Where x is smaller than y: nothing, a NaN or Inf at either end of x, a column that repeats."""
    m, n, k = 264, 300, 100
    w, bias = sparse(n, k, 0.3).cuda(), normal(n, device="cuda")
    clean = normal(k, m, device="cuda").t() if turned else normal(m, k, device="cuda")
    csr = to_csr(w, w != 0)
    for value, place in ((0, (0, 0)), (NAN, (0, 0)), (INF, (m - 1, k - 1))):
        x = clean.clone()
        x[place] = value
        found = _spmm_expand_sm90._expand(*csr, (n, k), x)[1]
        assert set(found.tolist()) == ({0} if value == 0 else {0, 1})
        y = _spmm_expand_sm90.spmm(x, *csr, bias, n, False, ieee)
        touched = torch.zeros(m, n, dtype=torch.bool, device="cuda")
        touched[place[0]] = (value != 0) & (w[:, place[1]] != 0)
        assert torch.equal(y.isfinite(), ~touched)
        reference = to_numpy(x.nan_to_num(0, 0, 0)) @ to_numpy(w).T + to_numpy(bias)
        assert_close(y[~touched], reference[to_numpy(~touched)])
    values, cols, offsets = csr
    first, second = int(offsets[n - 1]), int(offsets[n - 1]) + 1
    w[n - 1, cols[first]], w[n - 1, cols[second]] = values[first] + values[second], 0
    cols[second] = cols[first]
    assert _spmm_expand_sm90._expand(*csr, (n, k), clean)[1].sum() == 1
    y = _spmm_expand_sm90.spmm(clean, *csr, bias, n, False, ieee)
    assert_close(y, to_numpy(clean) @ to_numpy(w).T + to_numpy(bias))


@pytest.mark.gpu
@pytest.mark.usefixtures("hopper")
@pytest.mark.parametrize("dtype", _spmm_product_sm90.DTYPES)
@pytest.mark.parametrize("config", _spmm_product_sm90.POSSIBLE, ids=str)
@pytest.mark.parametrize("size", [(333, 401, 1001), (17, 70, 60), (600, 304, 784)], ids=str)
def test_every_configuration(dtype, config, size, normal, sparse, to_numpy, assert_close):
    m, n, k = size
    if not config.suits(m, n, k):
        pytest.skip("K has fewer parts than this cluster has blocks")
    w, bias = sparse(n, k, 0.3, dtype).cuda(), normal(n, dtype=dtype, device="cuda")
    wide = normal(m, -(-k // 8) * 8, dtype=dtype, device="cuda")
    x = wide[:, :k]
    values, cols, offsets = to_csr(w, w != 0)

    def product(*options):
        out = _spmm_expand_sm90.expand(values, cols, offsets, (n, k))
        return _spmm_product_sm90.product(x, out, values, cols, offsets, *options, config)

    assert _spmm_product_sm90.takes(x, n)
    assert_close(product(bias, n, True), (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0))
    w[9] = 0  # a column that repeats adds up
    first = int(offsets[9])
    cols[first + 1] = cols[first]
    row = slice(first, int(offsets[10]))
    w[9] = torch.zeros(k, device="cuda").index_add_(0, cols[row].long(), values[row].float()).to(dtype)
    x[1, 5], x[m - 2, 6], x[m - 1] = NAN, INF, NAN
    y = product(None, n, False)
    stored = torch.zeros(n, k, dtype=torch.bool, device="cuda")
    stored[torch.arange(n, device="cuda").repeat_interleave(offsets.diff()), cols.long()] = True
    touched = (~x.isfinite()).double() @ stored.double().t() > 0
    assert torch.equal(y.isfinite(), ~touched)
    reference = to_numpy(x.nan_to_num(0, 0, 0)) @ to_numpy(w).T
    assert_close(y[~touched], reference[to_numpy(~touched)])
