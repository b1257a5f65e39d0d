"""Weights in tiles of entries times activations, against the oracle and NumPy."""

import itertools

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _entry_tiles, _spmm_entries_sm80, _spmm_entries_sm90
from qsparse.oracles.spmm_entries import dense as oracle_dense
from qsparse.oracles.spmm_entries import spmm_entries as oracle

DTYPES = [torch.float16, torch.bfloat16]
NAMES = {torch.float16: "float16", torch.bfloat16: "bfloat16"}
NAN = float("nan")
BATCHES = [0, 1, 8, 9, 17, 64, 65, 200]


def pack(w: torch.Tensor, device) -> tuple[torch.Tensor, torch.Tensor]:
    """Entries and offsets of what is not zero in a dense matrix."""
    return tuple(part.to(device) for part in _entry_tiles.pack(w, w != 0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("size", [(1, 1), (5, 7), (32, 64), (33, 129), (10, 784)], ids=str)
def test_matches_the_oracle(device, dtype, size, normal, sparse, to_numpy, assert_close):
    for density in (0.0, 0.1, 1.0):
        tiles = pack(sparse(*size, density, dtype), device)
        x, bias = normal(max(BATCHES), size[1], dtype=dtype, device=device), normal(size[0], dtype=dtype, device=device)
        options = {"shape": size, "relu": True}
        reference = oracle(to_numpy(x), *to_numpy(tiles), to_numpy(bias), dtype=NAMES[dtype], **options)
        for m in BATCHES:
            y = kernels.spmm_entries(x[:m], *tiles, bias, **options)
            assert y.dtype == dtype
            assert y.device == device
            assert y.is_contiguous()
            assert_close(y, reference[:m])


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.15, 0.7])
@pytest.mark.parametrize("division", _spmm_entries_sm80.DIVISIONS, ids=str)
def test_every_division(division, density, normal, sparse, to_numpy, assert_close):
    """Also blocks that have rows of x of their own, and more entries than are fetched ahead."""
    device = torch.device("cuda", 0)
    w = sparse(270, 3777, density, torch.bfloat16)
    tiles = pack(w, device)
    for m in (division.batch - 3, 3 * division.batch - 1):
        x = torch.nn.functional.pad(normal(m, 3777, dtype=torch.bfloat16, device=device), (0, 7))[:, :3777]
        y = torch.full((m, 270), NAN, dtype=torch.float32, device=device)
        _spmm_entries_sm80.launch_few(division, x, *tiles, None, y, False)
        assert_close(y, to_numpy(x) @ to_numpy(w).T)


@pytest.mark.gpu
@pytest.mark.parametrize("density", [0.05, 0.7])
@pytest.mark.parametrize("split", _spmm_entries_sm90.SPLITS)
@pytest.mark.parametrize("size", [(1, 8), (67, 500), (270, 2100)], ids=str)
def test_every_split_of_some_dozens_of_rows(
    split, size, density, normal, sparse, to_numpy, assert_close, assert_same_bits
):
    """Rooms that are used again, more entries than are fetched ahead, parts and rows of tiles beyond W, odd outputs."""
    device = torch.device("cuda", 0)
    if torch.cuda.get_device_capability(device) != (9, 0):
        pytest.skip("clusters and the copy engine are Hopper's")
    w, (n, k) = sparse(*size, density, torch.float16), size
    tiles, bias = pack(w, device), normal(n, dtype=torch.float16, device=device)
    for m, dtype in itertools.product((1, 33, 64, 150), (torch.float16, torch.float32)):
        x = normal(m, k, dtype=torch.float16, device=device)
        y, again = (torch.full((m, n), NAN, dtype=dtype, device=device) for _ in range(2))
        for out in (y, again):
            _spmm_entries_sm90.launch_some(split, x, *tiles, bias, out, True)
        assert_close(y, (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0))
        assert_same_bits(y, again)


def test_k_is_divided_where_blocks_are_few():
    def chosen(*size):
        return _spmm_entries_sm90.choose(*size, 132)

    assert chosen(64, 4096, 4096) == chosen(33, 4096, 14336) == 2
    assert chosen(40, 14336, 4096) == 1
    assert chosen(64, 8192, 8192) == chosen(64, 14336, 4096) == 1
    assert chosen(64, 4096, 16384) == 2
    few = (32, 8192, 8192), (33, 4096, 4096), (64, 3072, 3072), (64, 1024, 784), (64, 1024, 2**14)
    for size in (*few, (65, 4096, 4096), (64, 4096, 100_000)):
        assert chosen(*size) is None


def test_case_15_bad_arrays_are_named(device, normal, sparse):
    w = sparse(20, 300, 0.3, torch.float16)
    entries, offsets = pack(w, device)
    x = normal(3, 300, dtype=torch.float16, device=device)
    options = {"shape": w.shape}
    beyond, odd, other = entries.clone(), entries.clone(), entries.clone()
    beyond[9], odd[9], other[9] = 4096 << 16, 1 << 16, entries[10] ^ 1
    fallen = offsets.index_fill(0, torch.tensor([2], device=device), -1)
    for bad, message in (
        ((entries[4:], offsets), "offsets must go from 0"),
        ((entries, offsets + 1), "offsets must go from 0"),
        ((entries, fallen), r"offsets\[2\] is -1, below offsets\[1\]"),
        ((beyond, offsets), r"entries\[9\] has a place outside the matrix of shape \(20, 300\): 4096"),
        ((odd, offsets), r"entries\[9\] has a place outside"),
        ((other, offsets), r"has the place of another entry"),
        ((entries, offsets[1:]), "offsets must have shape"),
    ):
        with pytest.raises(ValueError, match=message):
            kernels.spmm_entries(x, *bad, **options)
    with pytest.raises(TypeError, match="entries must be int32"):
        kernels.spmm_entries(x, entries.float(), offsets, **options)
    with pytest.raises(TypeError, match="x must be float16, bfloat16, got float32"):
        kernels.spmm_entries(x.float(), entries, offsets, **options)
    with pytest.raises(TypeError, match="out_dtype must be"):
        kernels.spmm_entries(x, entries, offsets, out_dtype=torch.bfloat16, **options)
    with pytest.raises(ValueError, match="shape must be"):
        kernels.spmm_entries(x, entries, offsets, shape=(20, 299))
    with pytest.raises(ValueError, match="tier 'sm70' is not possible"):
        kernels.spmm_entries(x, entries, offsets, tier="sm70", **options)


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_layout_entry_by_entry(dtype, sparse, to_numpy):
    w = sparse(100, 300, 0.3, dtype)
    tiles = _entry_tiles.pack(w, w != 0)
    assert np.array_equal(oracle_dense(*to_numpy(tiles), w.shape, NAMES[dtype]), to_numpy(w))


def test_a_warp_stores_to_different_banks(sparse):
    """As far as a tile has them: a store of 32 entries at random places would take 3.5 turns."""
    w = sparse(128, 256, 0.1, torch.float16)
    entries, offsets = _entry_tiles.pack(w, w != 0)
    turns, stores = 0, 0
    for begin, end in itertools.pairwise((4 * offsets).tolist()):
        for warp in (entries[begin:end].long() >> 16 & 0xFFFF).split(128):
            for places in warp.reshape(-1, 4).t():
                words = (places // 4).unique()
                turns, stores = turns + int(torch.bincount(words % 32).max()), stores + 1
    assert turns < 2 * stores
