import io
import json

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse.errors import UserError
from qsparse.report.sizes import show_sizes
from qsparse.sparse.compare import DTYPES, compare, parse_shape
from qsparse.sparse.formats import from_bitmap, to_bitmap, to_coordinates


def sizes_of(*arguments):
    return {size.format: size for size in compare(*arguments).sizes}


def test_the_sizes_of_a_matrix():
    sizes = sizes_of((1024, 784), 0.1, "float32")
    n, nnz = 1024 * 784, 80282
    assert {name: size.bytes for name, size in sizes.items()} == {
        "dense": 4 * n,
        "coo": 12 * nnz,
        "csr": 8 * nnz + 4 * 1025,
        "bitmap": 4 * nnz + n // 8,
        "2:4": 2 * n + n // 8,
    }
    assert sizes["coo"].break_even == pytest.approx(1 / 3)
    assert sizes["csr"].break_even == pytest.approx((4 * n - 4 * 1025) / (8 * n))
    assert sizes["bitmap"].break_even == pytest.approx(31 / 32)
    assert sizes["2:4"].break_even == 0.5
    assert sizes["dense"].break_even is None


@pytest.mark.parametrize(("shape", "share"), [((1000,), 4 / 8), ((10, 100), 4 / 12), ((10, 10, 10), 4 / 16)])
def test_each_dimension_costs_coordinates_an_index(shape, share):
    sizes = sizes_of(shape, 0.25, "float32")
    assert sizes["coo"].break_even == pytest.approx(share)
    assert sizes["coo"].bytes == 250 * 4 * (1 + len(shape))
    assert ("csr" in sizes) == (len(shape) == 2)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(40,), (8, 9), (3, 4, 5), (1, 1), (200, 1)])
def test_just_below_the_break_even_a_format_is_smaller_and_just_above_it_is_not(shape, dtype):
    entries = torch.Size(shape).numel()
    for name, size in sizes_of(shape, 0.5, dtype).items():
        if name in ("dense", "2:4", "entries"):  # the last is filled up by where the entries are
            continue
        for nnz in range(1, entries + 1):
            now = sizes_of(shape, nnz / entries, dtype)[name]
            if nnz / entries < size.break_even - 1e-9:
                assert now.ratio < 1
            elif nnz / entries > size.break_even + 1e-9:
                assert now.ratio > 1


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_entries_take_four_bytes_each_and_what_fills_their_tiles_up(dtype):
    size = sizes_of((40, 300), 0.1, dtype)["entries"]
    tiles = 2 * 5
    assert size.bytes == sum(size.arrays.values())
    assert size.arrays["offsets"] == 4 * (tiles + 1)
    assert 4 * 1200 <= size.arrays["entries"] <= 4 * (1200 + 3 * tiles)
    assert size.break_even == pytest.approx(0.5 - 4 * (tiles + 1) / (4 * 40 * 300))
    assert sizes_of((1, 1), 1.0, dtype)["entries"].break_even == 0
    for shape, other in (((40, 300), "float32"), ((40, 300), "int8"), ((12_000,), dtype)):
        assert "entries" not in sizes_of(shape, 0.1, other)


def test_2_to_4_holds_no_more_than_half_and_pads_the_last_group():
    assert "2:4" not in sizes_of((8, 8), 0.6, "float16")
    assert sizes_of((3, 5), 0.4, "float16")["2:4"].bytes == 3 * (4 * 2 + 1)
    assert sizes_of((4, 1), 0.5, "float32")["2:4"].break_even == 0  # padded to 4, larger than dense


@settings(deadline=None, max_examples=100)
@given(st.lists(st.integers(0, 5), min_size=1, max_size=3), st.integers(0, 9))
def test_bitmaps_and_coordinates_come_back(shape, seed):
    generator = torch.Generator().manual_seed(seed)
    array = torch.randn(shape, generator=generator)
    mask = torch.rand(shape, generator=generator) < 0.4
    values, bits = to_bitmap(array, mask)
    assert bits.dtype == torch.uint8
    assert torch.equal(from_bitmap(values, bits, tuple(shape)), array * mask + 0.0)
    values, indices = to_coordinates(array, mask)
    dense = torch.zeros(shape)
    dense[tuple(index.long() for index in indices)] = values
    assert torch.equal(dense, array * mask + 0.0)


def test_bit_i_is_entry_i():
    mask = torch.zeros(12, dtype=torch.bool)
    mask[[0, 3, 9]] = True
    assert to_bitmap(torch.arange(12.0), mask)[1].tolist() == [0b1001, 0b10]


def test_broken_bitmaps_are_refused():
    bits = torch.tensor([0b101], dtype=torch.uint8)
    for values, of, shape in ((3, bits, (2, 3)), (2, bits, (9,)), (2, bits, (2,))):
        with pytest.raises(ValueError, match="bits must be"):
            from_bitmap(torch.ones(values), of, shape)
    with pytest.raises(TypeError, match="mask must be bool"):
        to_bitmap(torch.ones(2), torch.ones(2))
    with pytest.raises(ValueError, match="one shape"):
        to_coordinates(torch.ones(2), torch.ones(3, dtype=torch.bool))


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (((2, 2), 0.0), "density"),
        (((2, 2), 0.5, "int4"), "unknown dtype 'int4'"),
        (((), 0.5), "1 to 3 sizes"),
        (((2, 2, 2, 2), 0.5), "1 to 3 sizes"),
        (((2, 0), 0.5), "not 2 x 0"),
        (((2**20, 2**20), 0.5), "entries at most"),
    ],
)
def test_what_is_refused(arguments, message):
    with pytest.raises(UserError, match=message):
        compare(*arguments)


def test_shapes_are_read():
    assert parse_shape("1024,784") == (1024, 784)
    for text in ("", "3,", "a", "3x4", "1.5"):
        with pytest.raises(UserError, match="such as 1024,784"):
            parse_shape(text)


def test_the_table_fits_80_columns_and_json_is_json(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    comparison = compare((1024, 784), 0.1)
    file = io.StringIO()
    show_sizes(comparison, file)
    lines = file.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for size in comparison.sizes:
        assert any(line.startswith(size.format) and f"{size.bytes:,}" in line for line in lines)
    value = json.loads(json.dumps(comparison.to_json(), allow_nan=False))
    assert value["sizes"][2]["arrays"]["row_offsets"] == 4100
