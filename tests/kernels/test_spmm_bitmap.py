"""Weights in bitmap tiles times activations, against the oracle and NumPy."""

import itertools

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _bitmap_tiles, _spmm_bitmap_sm80
from qsparse.oracles.spmm_bitmap import dense as oracle_dense
from qsparse.oracles.spmm_bitmap import spmm_bitmap as oracle

DTYPES = [torch.float16, torch.bfloat16, torch.float32]
NAN, INF = float("nan"), float("inf")
BATCHES = [0, 1, 8, 9, 17, 64, 65, 200]


def pack(w: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Values, masks and offsets of what is not zero in a dense matrix."""
    return tuple(part.to(device) for part in _bitmap_tiles.pack(w, w != 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (16, 128), (33, 129), (10, 784)], ids=str)
def test_matches_the_oracle(device, dtype, size, normal, sparse, to_numpy, assert_close):
    for density in (0.0, 0.1, 1.0):
        tiles = pack(sparse(*size, density, dtype), device)
        x, bias = normal(max(BATCHES), size[1], dtype=dtype, device=device), normal(size[0], dtype=dtype, device=device)
        reference = oracle(to_numpy(x), *to_numpy(tiles), to_numpy(bias), shape=size, relu=True)
        for m in BATCHES:
            y = kernels.spmm_bitmap(x[:m], *tiles, bias, shape=size, relu=True)
            assert y.dtype == dtype
            assert y.device == device
            assert y.is_contiguous()
            assert_close(y, reference[:m])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("m", [3, 16, 30, 64, 300])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 1.0])
def test_many_tiles(device, dtype, m, density, normal, sparse, to_numpy, assert_close):
    """Several tiles a warp, rounds of values a tile, and blocks that divide K."""
    w = sparse(529, 1500, density, dtype)
    x = normal(m, 1500, dtype=dtype, device=device)
    reference = to_numpy(x) @ to_numpy(w).T
    tiles = pack(w, device)
    assert_close(kernels.spmm_bitmap(x, *tiles, shape=w.shape), reference)
    y = kernels.spmm_bitmap(x, *tiles, shape=w.shape, out_dtype=torch.float32, check=False)
    assert y.dtype == torch.float32
    assert_close(y, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["simt", "sm80"])
@pytest.mark.parametrize("m", [1, 8, 64, 100, 1000])
def test_every_tier_and_the_same_bits_each_time(tier, m, normal, sparse, to_numpy, assert_close, assert_same_bits):
    device = torch.device("cuda", 0)
    w = sparse(300, 2000, 0.2, torch.float16)
    x, bias = (normal(*size, dtype=torch.float16, device=device) for size in ((m, 2000), (300,)))
    tiles = pack(w, device)
    y, again = (kernels.spmm_bitmap(x, *tiles, bias, shape=w.shape, relu=True, tier=tier) for _ in range(2))
    assert_close(y, (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0))
    assert_same_bits(y, again)


@pytest.mark.gpu
@pytest.mark.parametrize("ahead", [False, True])
def test_every_division(ahead, normal, sparse, to_numpy, assert_close):
    """Each number of warps, and of warps and blocks that divide K, also more of them than there are tiles."""
    device = torch.device("cuda", 0)
    limit = torch.cuda.get_device_properties(device).shared_memory_per_block_optin
    w = sparse(270, 777, 0.15, torch.bfloat16)
    tiles = pack(w, device)
    for m in (5, 50):
        x = torch.nn.functional.pad(normal(m, 777, dtype=torch.bfloat16, device=device), (0, 7))[:, :777]
        reference = to_numpy(x) @ to_numpy(w).T
        divisions = ((4, 1), (4, 4), (8, 2), (8, 8), (16, 1), (16, 8), (16, 16))
        for batch, (warps, segments), split in itertools.product((8, 32, 64), divisions, (1, 2, 3, 16)):
            if batch * warps > 512:
                continue
            config = _spmm_bitmap_sm80.Config(batch, warps, segments, split)
            if config.shared(777) <= limit:
                y = torch.full((m, 270), NAN, dtype=torch.float32, device=device)
                _spmm_bitmap_sm80.launch_few(x, *tiles, None, y, relu=False, config=config, ahead=ahead)
                assert_close(y, reference)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (5, 7)], ids=str)
def test_case_13_nothing_stored(device, size, normal):
    bias = normal(size[0], device=device, dtype=torch.float16)
    tiles = pack(torch.zeros(size, dtype=torch.float16), device)
    for m in (0, 1, 100):
        x = normal(m, size[1], device=device, dtype=torch.float16)
        y = kernels.spmm_bitmap(x, *tiles, shape=size)
        assert torch.equal(y, torch.zeros_like(y))
        assert y.shape == (m, size[0])
        assert torch.equal(kernels.spmm_bitmap(x, *tiles, bias, shape=size), bias.expand(m, size[0]))


@pytest.mark.parametrize("m", [1, 40, 100])
def test_one_dense_row_among_ten_thousand_empty_ones(device, m, normal, to_numpy, assert_close):
    w = torch.zeros(10_001, 300, dtype=torch.float16)
    w[7000] = normal(300).abs()
    x = normal(m, 300, device=device, dtype=torch.float16).abs()
    y = kernels.spmm_bitmap(x, *pack(w, device), shape=w.shape)
    assert_close(y[:, 7000], to_numpy(x) @ to_numpy(w[7000]))
    y[:, 7000] = 0
    assert (y == 0).all()


@pytest.mark.parametrize("m", [2, 30, 100])
@pytest.mark.parametrize("value", [NAN, INF])
def test_case_9_what_is_not_finite_stays_in_its_row(device, m, value, sparse, normal):
    """In x it reaches all of its row, since zeros are multiplied; in W all of its output, and no other."""
    w, x = sparse(50, 400, 0.3, torch.float16), normal(m, 400, device=device, dtype=torch.float16)
    clean = kernels.spmm_bitmap(x, *pack(w, device), shape=w.shape)
    x[1, 5] = value
    y = kernels.spmm_bitmap(x, *pack(w, device), shape=w.shape)
    assert torch.equal(y[1].isfinite().cpu(), torch.zeros(50, dtype=torch.bool))
    assert torch.equal(y[0], clean[0])
    x[1, 5] = 1
    w[7, 300] = value
    y = kernels.spmm_bitmap(x, *pack(w, device), shape=w.shape)
    assert torch.equal(y.isfinite().all(dim=0).cpu(), torch.arange(50) != 7)


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_12_views(device, dtype, normal, sparse, to_numpy, assert_close):
    w = sparse(20, 31, 0.3, dtype)
    values, masks, offsets = pack(w, device)
    wide = normal(62, 62, dtype=dtype, device=device)
    stretched = torch.stack((values, values), 1)[:, 0], torch.stack((masks, masks), 2)[:, :, 1], offsets
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
            assert_close(kernels.spmm_bitmap(x, *stretched, bias, shape=w.shape), reference)


def test_values_that_start_anywhere(device, normal, sparse, to_numpy, assert_close):
    w = sparse(20, 300, 0.3, torch.float16)
    values, masks, offsets = pack(w, device)
    x = normal(9, 300, dtype=torch.float16, device=device)
    for shift in (1, 4):
        moved = torch.nn.functional.pad(values, (shift, 0))[shift:]
        assert_close(kernels.spmm_bitmap(x, moved, masks, offsets, shape=w.shape), to_numpy(x) @ to_numpy(w).T)


def test_case_15_bad_arrays_are_named(device, normal, sparse):
    w = sparse(20, 300, 0.3, torch.float16)
    values, masks, offsets = pack(w, device)
    x = normal(3, 300, dtype=torch.float16, device=device)
    options = {"shape": w.shape}
    for bad, message in (
        ((values[8:], masks, offsets), "offsets must go from 0"),
        ((values, masks, offsets + 1), "offsets must go from 0"),
        ((values, masks, offsets.index_fill(0, torch.tensor([2], device=device), 9999)), r"offsets\[2\] is 9999"),
        ((values, masks.roll(1, 0), offsets), r"by the ones of masks"),
        ((values, masks[1:], offsets), "masks must have shape"),
        ((values, masks, offsets[1:]), "offsets must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.spmm_bitmap(x, *bad, **options)
    outside = _bitmap_tiles.pack(torch.ones(32, 384), torch.ones(32, 384) > 0)
    with pytest.raises(ValueError, match="ones outside"):
        kernels.spmm_bitmap(x.float(), *(part.to(device) for part in outside), **options)
    with pytest.raises(TypeError, match="values must be float16"):
        kernels.spmm_bitmap(x, values.float(), masks, offsets, **options)
    with pytest.raises(ValueError, match="shape must be"):
        kernels.spmm_bitmap(x, values, masks, offsets, shape=(20, 299))


def test_the_layout_bit_by_bit(sparse, to_numpy):
    w = sparse(40, 300, 0.3, torch.float16)
    tiles = _bitmap_tiles.pack(w, w != 0)
    assert np.array_equal(oracle_dense(*to_numpy(tiles), w.shape), to_numpy(w))


@pytest.mark.parametrize("capability", [(132, 227 * 1024), (108, 163 * 1024), (84, 99 * 1024), (30, 64 * 1024)])
def test_every_product_is_divided_within_the_limits(capability):
    for m in (1, 8, 20, 64):
        for n, k in ((10, 784), (4096, 4096), (16384, 16384), (1, 1), (256, 100_000)):
            config = _spmm_bitmap_sm80.choose(m, n, k, *capability)
            if config is not None:
                assert config.shared(k) <= capability[1]
                assert config.share(k) <= 31
            else:
                assert k > 16384 or capability[1] < 100_000


@pytest.mark.parametrize(
    "values", [(7, 16, 1, 1), (8, 2, 1, 1), (8, 16, 1, 17), (8, 8, 16, 1), (8, 16, 3, 1), (64, 16, 1, 1)]
)
def test_a_config_is_checked(values):
    with pytest.raises(ValueError, match="not a division"):
        _spmm_bitmap_sm80.Config(*values)
