"""Tiles of entries from and to dense and CSR matrices."""

import pytest
import torch

from qsparse.sparse import csr_to_entry_tiles, from_entry_tiles, to_csr, to_entry_tiles
from qsparse.sparse.entry_tiles import entry_tiles_bytes

SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (32, 64), (33, 65), (10, 784), (40, 300)]


def matrix(shape, density, dtype=torch.float16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(dtype), torch.rand(shape, generator=generator) < density


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_comes_back(shape, density, dtype):
    w, mask = matrix(shape, density, dtype)
    assert torch.equal(from_entry_tiles(*to_entry_tiles(w, mask), shape, dtype), w * mask)


def test_takes_the_bytes_it_promises():
    w, mask = matrix((512, 1024), 0.1)
    size = sum(part.numel() * part.element_size() for part in to_entry_tiles(w, mask))
    assert size < 1.03 * 4 * int(mask.sum())


def test_a_stored_zero_and_what_the_mask_leaves_out():
    w, mask = torch.tensor([[0.0, 2.0, 3.0]]).half(), torch.tensor([[True, False, True]])
    entries, offsets = to_entry_tiles(w, mask)
    assert sorted(entries.tolist()) == [0, *[4 * 2 << 16 | 0x4200] * 3]  # column 2 is the second pair; 3.0; it fills up
    assert offsets.tolist() == [0, 1]


def test_from_csr_sums_duplicates_and_keeps_zeros():
    w, mask = matrix((20, 300), 0.2)
    tiles = csr_to_entry_tiles(*to_csr(w, mask), w.shape)
    for ours, direct in zip(tiles, to_entry_tiles(w, mask), strict=True):
        assert torch.equal(ours, direct)
    cols, offsets = torch.tensor([3, 3, 4]).int(), torch.tensor([0, 3]).int()
    tiles = csr_to_entry_tiles(torch.tensor([1.0, 2.0, 0.0]).half(), cols, offsets, (1, 5))
    assert from_entry_tiles(*tiles, (1, 5), torch.float16).tolist() == [[0, 0, 0, 3, 0]]
    assert len(set(tiles[0].tolist())) == 2


@pytest.mark.parametrize("bad", [(torch.ones(2, 3), torch.ones(2, 4) > 0), (torch.ones(3), torch.ones(3) > 0)])
def test_refuses_shapes(bad):
    with pytest.raises(ValueError, match="matrices of one shape"):
        to_entry_tiles(bad[0].half(), bad[1])


def test_refuses_what_does_not_fit():
    w, mask = matrix((20, 300), 0.2)
    entries, offsets = to_entry_tiles(w, mask)
    with pytest.raises(TypeError, match="bool"):
        to_entry_tiles(w, mask.int())
    with pytest.raises(TypeError, match="float16 or bfloat16"):
        to_entry_tiles(w.float(), mask)
    for arrays in ((entries[4:], offsets), (entries, offsets[1:])):
        with pytest.raises(ValueError, match=r"offsets must"):
            from_entry_tiles(*arrays, w.shape, w.dtype)
    for dtype in (torch.float32, torch.int8):
        with pytest.raises(TypeError, match=r"^dtype must be one of torch.float16, torch.bfloat16"):
            from_entry_tiles(entries, offsets, w.shape, dtype)
    with pytest.raises(ValueError, match="outside the matrix"):
        from_entry_tiles(entries, offsets, (20, 290), w.dtype)


@pytest.mark.parametrize("shape", [(1, 1), (32, 64), (33, 65), (100, 300), (5, 1000)])
@pytest.mark.parametrize("density", [0.0, 0.05, 0.5, 1.0])
def test_the_bytes_are_those_of_the_tiles(shape, density):
    w = torch.randn(shape, generator=torch.Generator().manual_seed(0)).half()
    mask = torch.rand(shape, generator=torch.Generator().manual_seed(1)) < density
    assert entry_tiles_bytes(mask) == tuple(part.nbytes for part in to_entry_tiles(w, mask))
