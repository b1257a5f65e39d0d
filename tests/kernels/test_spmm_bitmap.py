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
NAN = float("nan")
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


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", _spmm_bitmap_sm80.DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (33, 129), (401, 1001), (64, 2048), (4100, 2056)], ids=str)
def test_w_is_written_out(dtype, size, sparse):
    """Whole tiles and cut ones, one and several a warp, of all densities, half full ones among them; beyond K zeros."""
    for density in (0.0, 0.02, 0.3, 0.5, 0.8, 1.0):
        w = sparse(*size, density, dtype).cuda()
        w[size[0] // 2] = 0
        values, masks, offsets = _bitmap_tiles.pack(w, w != 0)
        out = torch.full((size[0], -(-size[1] // 8) * 8), NAN, dtype=dtype, device="cuda")
        _spmm_bitmap_sm80.launch_write(values, masks, offsets, out, size[1])
        assert torch.equal(out[:, : size[1]], w)
        assert not out[:, size[1] :].any()


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
