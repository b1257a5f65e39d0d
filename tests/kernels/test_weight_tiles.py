"""What weights in tiles of either kind, bitmaps and entries, have in common when they meet activations."""

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _bitmap_tiles, _entry_tiles

TILES = {"spmm_bitmap": _bitmap_tiles, "spmm_entries": _entry_tiles}
DTYPES = [
    *((face, dtype) for face in TILES for dtype in (torch.float16, torch.bfloat16)),
    ("spmm_bitmap", torch.float32),
]
NAN, INF = float("nan"), float("inf")


@pytest.fixture(params=TILES)
def product(request):
    """x and a dense w: their product, by what is not zero in w; ``put`` may place the arrays anew."""
    pack, function = TILES[request.param].pack, getattr(kernels, request.param)

    def multiply(x, w, *bias, put=lambda array: array, **options):
        return function(x, *(put(part.to(x.device)) for part in pack(w, w != 0)), *bias, shape=w.shape, **options)

    return multiply


@pytest.mark.parametrize(("product", "dtype"), DTYPES, indirect=["product"])
@pytest.mark.parametrize("m", [3, 16, 30, 64, 300])
@pytest.mark.parametrize("density", [0.02, 0.1, 0.5, 1.0])
def test_many_tiles(product, device, dtype, m, density, normal, sparse, to_numpy, assert_close):
    """Several tiles a warp, more of a tile than is fetched ahead, and blocks that divide K."""
    k = 4500 if m <= 64 else 1004  # for what longer sums of the dense product err see test_gemm_tiers
    w, x = sparse(529, k, density, dtype), normal(m, k, dtype=dtype, device=device)
    reference = to_numpy(x) @ to_numpy(w).T
    assert_close(product(x, w), reference)
    y = product(x, w, out_dtype=torch.float32, check=False)
    assert y.dtype == torch.float32
    assert_close(y, reference)


@pytest.mark.gpu
@pytest.mark.parametrize("tier", ["simt", "sm80"])
@pytest.mark.parametrize("m", [1, 8, 64, 100, 1000])
def test_every_tier_and_the_same_bits_each_time(
    product, tier, m, normal, sparse, to_numpy, assert_close, assert_same_bits
):
    device = torch.device("cuda", 0)
    w = sparse(300, 2000, 0.2, torch.float16)
    x, bias = (normal(*size, dtype=torch.float16, device=device) for size in ((m, 2000), (300,)))
    y, again = (product(x, w, bias, relu=True, tier=tier) for _ in range(2))
    assert_close(y, (to_numpy(x) @ to_numpy(w).T + to_numpy(bias)).clip(min=0))
    assert_same_bits(y, again)


@pytest.mark.parametrize("size", [(0, 5), (5, 0), (0, 0), (5, 7)], ids=str)
def test_case_13_nothing_stored(product, device, size, normal):
    w, bias = torch.zeros(size, dtype=torch.float16), normal(size[0], device=device, dtype=torch.float16)
    for m in (0, 1, 100):
        x = normal(m, size[1], device=device, dtype=torch.float16)
        y = product(x, w)
        assert torch.equal(y, torch.zeros_like(y))
        assert y.shape == (m, size[0])
        assert torch.equal(product(x, w, bias), bias.expand(m, size[0]))


@pytest.mark.parametrize("m", [1, 40, 100])
def test_one_dense_row_among_ten_thousand_empty_ones(product, device, m, normal, to_numpy, assert_close):
    w = torch.zeros(10_001, 300, dtype=torch.float16)
    w[7000] = normal(300).abs()
    x = normal(m, 300, device=device, dtype=torch.float16).abs()
    y = product(x, w)
    assert_close(y[:, 7000], to_numpy(x) @ to_numpy(w[7000]))
    y[:, 7000] = 0
    assert (y == 0).all()


@pytest.mark.parametrize("m", [2, 30, 100])
@pytest.mark.parametrize("value", [NAN, INF])
def test_case_9_what_is_not_finite_stays_in_its_row(product, device, m, value, sparse, normal):
    """In x it reaches all of its row, since zeros are multiplied; in W all of its output, and no other."""
    w, x = sparse(50, 400, 0.3, torch.float16), normal(m, 400, device=device, dtype=torch.float16)
    clean = product(x, w)
    x[1, 5] = value
    y = product(x, w)
    assert torch.equal(y[1].isfinite().cpu(), torch.zeros(50, dtype=torch.bool))
    assert torch.equal(y[0], clean[0])
    x[1, 5] = 1
    w[7, 300] = value
    assert torch.equal(product(x, w).isfinite().all(dim=0).cpu(), torch.arange(50) != 7)


@pytest.mark.parametrize(("product", "dtype"), DTYPES, indirect=["product"])
def test_case_12_views(product, device, dtype, normal, sparse, to_numpy, assert_close):
    w = sparse(20, 31, 0.3, dtype)
    wide, bias = normal(62, 62, dtype=dtype, device=device), normal(40, dtype=dtype, device=device)[::2]
    for m in (4, 31):
        for x in (
            wide[:m, :31],
            wide[:31, :m].t(),
            wide[: 2 * m : 2, ::2],
            wide.flip(1)[:m, :31],
            wide[:1, :31].expand(m, -1),
            wide[:m, :1].expand(-1, 31),
        ):
            y = product(x, w, bias, put=lambda array: torch.stack((array, array), -1)[..., 1])
            assert_close(y, to_numpy(x) @ to_numpy(w).T + to_numpy(bias))


@pytest.mark.parametrize("shift", [1, 4])
def test_arrays_that_start_anywhere(product, device, shift, normal, sparse, to_numpy, assert_close):
    w, x = sparse(20, 300, 0.3, torch.float16), normal(9, 300, dtype=torch.float16, device=device)

    def moved(array):
        return torch.nn.functional.pad(array.flatten(), (shift, 0))[shift:].view(array.shape)

    assert_close(product(x, w, put=moved), to_numpy(x) @ to_numpy(w).T)
