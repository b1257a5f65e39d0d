import numpy as np
import pytest
import scipy.sparse
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse.sparse import (
    compress_24,
    csr_to_bitmap_tiles,
    csr_to_entry_tiles,
    expand_24,
    from_bitmap_tiles,
    from_coo,
    from_csr,
    from_entry_tiles,
    to_bitmap_tiles,
    to_coo,
    to_csr,
)
from qsparse.sparse.formats import from_bitmap, to_bitmap

SHAPES = [(1, 1), (3, 5), (7, 1), (1, 9), (16, 33), (0, 4), (4, 0), (0, 0)]
DENSITIES = [0.0, 0.05, 0.5, 1.0]


def matrix_and_mask(shape, density, seed=0):
    generator = torch.Generator().manual_seed(seed)
    w = torch.randn(shape, generator=generator)
    return w, torch.rand(shape, generator=generator) < density


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", DENSITIES)
def test_csr_is_scipys(shape, density):
    w, mask = matrix_and_mask(shape, density)
    values, col_indices, row_offsets = to_csr(w, mask)
    expected = scipy.sparse.csr_array((w * mask).numpy())
    np.testing.assert_array_equal(values.numpy(), expected.data)
    np.testing.assert_array_equal(col_indices.numpy(), expected.indices)
    np.testing.assert_array_equal(row_offsets.numpy(), expected.indptr)
    assert (col_indices.dtype, row_offsets.dtype, values.dtype) == (torch.int32, torch.int32, w.dtype)
    torch.testing.assert_close(from_csr(values, col_indices, row_offsets, shape), w * mask, rtol=0, atol=0)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("density", DENSITIES)
def test_coo_is_scipys(shape, density):
    w, mask = matrix_and_mask(shape, density)
    values, rows, cols = to_coo(w, mask)
    expected = scipy.sparse.coo_array((w * mask).numpy())
    np.testing.assert_array_equal(values.numpy(), expected.data)
    np.testing.assert_array_equal(rows.numpy(), expected.coords[0])
    np.testing.assert_array_equal(cols.numpy(), expected.coords[1])
    assert (rows.dtype, cols.dtype, values.dtype) == (torch.int32, torch.int32, w.dtype)
    torch.testing.assert_close(from_coo(values, rows, cols, shape), w * mask, rtol=0, atol=0)


@pytest.mark.parametrize("compress", [to_csr, to_coo])
def test_the_mask_decides_not_the_value(compress):
    w = torch.tensor([[0.0, 1.0], [2.0, 0.0]])
    mask = torch.tensor([[True, False], [True, False]])
    values, *indices = compress(w, mask)
    assert values.tolist() == [0.0, 2.0]
    expected = {to_csr: [[0, 0], [0, 1, 2]], to_coo: [[0, 1], [0, 0]]}
    assert [index.tolist() for index in indices] == expected[compress]


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 4), st.integers(-9, 9)), max_size=30))
def test_unsorted_coo_with_duplicates_is_summed_like_scipys(entries):
    rows, cols, values = (torch.tensor([entry[i] for entry in entries], dtype=torch.int32) for i in range(3))
    expected = scipy.sparse.coo_array((values.float().numpy(), (rows.numpy(), cols.numpy())), shape=(4, 5)).toarray()
    np.testing.assert_array_equal(from_coo(values.float(), rows, cols, (4, 5)).numpy(), expected)


def test_csr_with_duplicates_in_a_row_is_summed():
    dense = from_csr(torch.tensor([1.0, 2.0, 4.0]), torch.tensor([1, 1, 0]), torch.tensor([0, 2, 2, 3]), (3, 2))
    assert dense.tolist() == [[0, 3], [0, 0], [4, 0]]


@pytest.mark.parametrize(("dtype", "big"), [(torch.float16, 2048), (torch.bfloat16, 256)])
def test_duplicates_of_halves_are_rounded_once(dtype, big):
    """A big one swallows each of the ones when every sum is rounded; in float32 they count."""
    values = torch.tensor([big, 1, 1, 1, 1, -1], dtype=dtype)
    cols, offsets = torch.tensor([1, 1, 1, 1, 1, 0]).int(), torch.tensor([0, 6]).int()
    dense = from_csr(values, cols, offsets, (1, 2))
    assert dense.dtype == dtype
    assert dense.tolist() == from_coo(values, torch.zeros(6).int(), cols, (1, 2)).tolist() == [[-1, big + 4]]
    assert (
        from_entry_tiles(*csr_to_entry_tiles(values, cols, offsets, (1, 2)), (1, 2), dtype).tolist() == dense.tolist()
    )
    bitmap = csr_to_bitmap_tiles(values, cols, offsets, (1, 2))
    assert from_bitmap_tiles(*bitmap, (1, 2)).tolist() == dense.tolist()


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize(("compress", "expand"), [(to_csr, from_csr), (to_coo, from_coo)])
def test_half_values_stay_half(dtype, compress, expand):
    w, mask = matrix_and_mask((5, 6), 0.5)
    arrays = compress(w.to(dtype), mask)
    assert arrays[0].dtype == dtype
    torch.testing.assert_close(expand(*arrays, (5, 6)), w.to(dtype) * mask, rtol=0, atol=0)


@pytest.mark.parametrize("view", [lambda t: t.t(), lambda t: t[::2], lambda t: t[:, 1:], lambda t: t[:1].expand(4, -1)])
def test_views_are_read_by_their_strides(view):
    w, mask = matrix_and_mask((6, 7), 0.5)
    shape = tuple(view(w).shape)
    torch.testing.assert_close(from_csr(*to_csr(view(w), view(mask)), shape), view(w) * view(mask), rtol=0, atol=0)


def test_a_wrong_mask_is_refused():
    w = torch.ones(2, 3)
    with pytest.raises(TypeError, match=r"mask must be bool, not torch\.float32"):
        to_csr(w, torch.ones(2, 3))
    with pytest.raises(ValueError, match=r"not \(2, 3\) and \(3, 2\)"):
        to_coo(w, torch.ones(3, 2, dtype=torch.bool))
    with pytest.raises(ValueError, match="matrices"):
        to_csr(w[0], torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("cols", "offsets", "message"),
    [
        ([0, 3], [0, 1, 2], "entry 1 has column index 3, outside 0..2"),
        ([-1, 0], [0, 1, 2], "entry 0 has column index -1, outside 0..2"),
        ([0, 1], [0, 3, 2], "row_offsets decrease at entry 2"),
        ([0, 1], [0, 1, 3], "from 0 to 2"),
        ([0, 1], [1, 1, 2], "from 0 to 2"),
        ([0, 1], [0, 2], "3 entries"),
    ],
)
def test_bad_csr_indices_are_refused(cols, offsets, message):
    with pytest.raises(ValueError, match=message):
        from_csr(torch.ones(2), torch.tensor(cols), torch.tensor(offsets), (2, 3))


def test_bad_coo_indices_are_refused():
    with pytest.raises(ValueError, match=r"entry 1 has row index 2, outside 0\.\.1"):
        from_coo(torch.ones(2), torch.tensor([0, 2]), torch.tensor([0, 0]), (2, 3))
    with pytest.raises(ValueError, match="one length"):
        from_coo(torch.ones(2), torch.tensor([0]), torch.tensor([0, 0]), (2, 3))


def two_of_four(shape, seed=0, density=1.0, dtype=torch.float32):
    """A matrix that keeps two random columns of every four, or fewer, and its mask."""
    n, k = shape
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand((n, -(-k // 4), 4), generator=generator).argsort(dim=2)
    mask = ((order < 2) & (torch.rand(order.shape, generator=generator) < density)).reshape(n, -(-k // 4) * 4)[:, :k]
    w = torch.randint(1, 100, shape, generator=generator).to(dtype)
    return w * mask, mask


@pytest.mark.parametrize("shape", [(1, 1), (3, 5), (7, 8), (2, 9), (16, 33), (5, 64), (0, 4), (4, 0), (0, 0)])
@pytest.mark.parametrize("density", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16, torch.int8])
def test_24_there_and_back(shape, density, dtype):
    w, mask = two_of_four(shape, density=density, dtype=dtype)
    for arrays in (compress_24(w), compress_24(w + (~mask).to(dtype), mask)):
        values, metadata = arrays
        width = -(-shape[1] // 8) * 8
        assert values.shape == (shape[0], width // 2)
        assert metadata.shape == (shape[0], width // 8)
        assert (values.dtype, metadata.dtype) == (dtype, torch.uint8)
        torch.testing.assert_close(expand_24(values, metadata, shape), w, rtol=0, atol=0)


def test_24_bits():
    w = torch.tensor([[0, 5, 0, 7, 1, 2, 0, 0, 0, 0, 3, 4, 0, 0, 0, 9], [0] * 16])
    values, metadata = compress_24(w)
    assert values.tolist() == [[5, 7, 1, 2, 3, 4, 0, 9], [0] * 8]
    assert metadata.tolist() == [[0b0100_1101, 0b1100_1110], [0b0100_0100] * 2]
    assert compress_24(w[:, :14])[0].tolist() == [[5, 7, 1, 2, 3, 4, 0, 0], [0] * 8]


def test_24_refuses_a_third_entry_and_what_does_not_fit():
    w, mask = two_of_four((5, 24))
    full = w.clone()
    full[3, 8:12] = 1
    with pytest.raises(ValueError, match="row 3 has more than two entries in columns 8 to 11"):
        compress_24(full)
    values, metadata = compress_24(full, mask)
    with pytest.raises(TypeError, match="metadata must be uint8"):
        expand_24(values, metadata.int(), (5, 24))
    with pytest.raises(ValueError, match=r"must be \(5, 12\) and \(5, 3\), not \(5, 11\)"):
        expand_24(values[:, 1:], metadata, (5, 24))
    with pytest.raises(ValueError, match="values beyond column 17"):
        expand_24(values, metadata, (5, 17))
    metadata[2, 1] = 0b0100_0001
    with pytest.raises(ValueError, match=r"row 2: columns \[1, 0\] of group 2 do not ascend"):
        expand_24(values, metadata, (5, 24))
    with pytest.raises(ValueError, match="matrix"):
        compress_24(w[0])


def test_24_keeps_nan_and_reads_views_by_their_strides():
    w, _ = two_of_four((8, 24))
    w[2, w[2].nonzero()[0]] = torch.nan
    values, metadata = compress_24(w.t().contiguous().t())
    torch.testing.assert_close(expand_24(values, metadata, (8, 24)), w, rtol=0, atol=0, equal_nan=True)


@pytest.mark.parametrize(
    ("call", "name"),
    [
        (lambda a: compress_24(a), "w"),
        (lambda a: compress_24(torch.ones(1, 4), a), "mask"),
        (lambda a: to_csr(a, torch.ones(1, 4, dtype=torch.bool)), "w"),
        (lambda a: to_coo(torch.ones(1, 4), a), "mask"),
        (lambda a: to_bitmap(a, torch.ones(1, 4, dtype=torch.bool)), "w"),
        (lambda a: to_bitmap_tiles(torch.ones(1, 4), a), "mask"),
        (lambda a: expand_24(a, torch.zeros(1, 1, dtype=torch.uint8), (1, 8)), "values"),
        (lambda a: expand_24(torch.ones(1, 4), a, (1, 8)), "metadata"),
        (lambda a: from_csr(torch.ones(1), a, torch.tensor([0, 1]), (1, 4)), "col_indices"),
        (lambda a: from_coo(torch.ones(1), torch.tensor([0]), a, (1, 4)), "cols"),
        (lambda a: from_bitmap(torch.ones(1), a, (1, 4)), "bits"),
        (lambda a: from_bitmap_tiles(a, torch.ones(1), torch.ones(1), (1, 4)), "values"),
        (lambda a: csr_to_bitmap_tiles(a, torch.tensor([0]), torch.tensor([0, 1]), (1, 4)), "values"),
    ],
)
@pytest.mark.parametrize("array", [[[1.0, 0.0, 2.0, 0.0]], np.ones((1, 4), dtype=bool)], ids=["list", "ndarray"])
def test_what_is_no_tensor_is_named(call, name, array):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, not {type(array).__name__}$"):
        call(array)
