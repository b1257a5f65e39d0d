"""Bitmap tiles from and to dense and CSR matrices."""

import pytest
import torch

from qsparse.sparse import to_csr
from qsparse.sparse.bitmap_tiles import csr_to_bitmap_tiles, from_bitmap_tiles, to_bitmap_tiles

SIZES = [(0, 0), (0, 5), (5, 0), (1, 1), (16, 128), (17, 129), (10, 784), (40, 300)]


def matrix(shape, density, dtype=torch.float16):
    generator = torch.Generator().manual_seed(1)
    return torch.randn(shape, generator=generator).to(dtype), torch.rand(shape, generator=generator) < density


@pytest.mark.parametrize("shape", SIZES, ids=str)
@pytest.mark.parametrize("density", [0.0, 0.1, 1.0])
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_comes_back(shape, density, dtype):
    w, mask = matrix(shape, density, dtype)
    tiles = to_bitmap_tiles(w, mask)
    assert torch.equal(from_bitmap_tiles(*tiles, shape), w * mask)
    assert tiles[0].dtype == dtype
    assert (tiles[2].diff() >= 1).all()


def test_takes_the_bytes_it_promises():
    w, mask = matrix((512, 1024), 0.1)
    tiles = to_bitmap_tiles(w, mask)
    size = sum(part.numel() * part.element_size() for part in tiles)
    assert size < 1.03 * (2 * int(mask.sum()) + w.numel() / 8)


def test_a_stored_zero_and_what_the_mask_leaves_out():
    w, mask = torch.tensor([[0.0, 2.0, 3.0]]), torch.tensor([[True, False, True]])
    values, masks, offsets = to_bitmap_tiles(w, mask)
    assert values.tolist() == [0, 3, 0, 0, 0, 0, 0, 0]
    assert masks[0, 0] == 0b101
    assert masks.count_nonzero() == 1
    assert offsets.tolist() == [0, 1]


def test_from_csr_sums_duplicates_and_keeps_zeros():
    w, mask = matrix((20, 300), 0.2, torch.float32)
    tiles = csr_to_bitmap_tiles(*to_csr(w, mask), w.shape)
    for ours, direct in zip(tiles, to_bitmap_tiles(w, mask), strict=True):
        assert torch.equal(ours, direct)
    values, cols, offsets = torch.tensor([1.0, 2.0, 0.0]), torch.tensor([3, 3, 4]).int(), torch.tensor([0, 3]).int()
    values, masks, _ = csr_to_bitmap_tiles(values, cols, offsets, (1, 5))
    assert values[:2].tolist() == [3, 0]
    assert masks[0, 0] == 0b11000


@pytest.mark.parametrize("bad", [(torch.ones(2, 3), torch.ones(2, 4) > 0), (torch.ones(3), torch.ones(3) > 0)])
def test_refuses_shapes(bad):
    with pytest.raises(ValueError, match="matrices of one shape"):
        to_bitmap_tiles(*bad)


def test_refuses_what_does_not_fit():
    w, mask = matrix((20, 300), 0.2)
    values, masks, offsets = to_bitmap_tiles(w, mask)
    with pytest.raises(TypeError, match="bool"):
        to_bitmap_tiles(w, mask.int())
    for arrays in ((values, masks[1:], offsets), (values, masks, offsets[1:]), (values[8:], masks, offsets)):
        with pytest.raises(ValueError, match=r"masks must be|offsets must go"):
            from_bitmap_tiles(*arrays, w.shape)
    with pytest.raises(ValueError, match="ones outside"):
        from_bitmap_tiles(values, masks, offsets, (20, 290))
