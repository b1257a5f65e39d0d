"""Every way to multiply by sparse weights against SciPy in float64: what can be stored, and what each must refuse."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from unittest import mock

import numpy as np
import pytest
import scipy.sparse
import torch

from qsparse import kernels, nn, sparse
from qsparse.kernels import _bitmap_tiles, _spmm
from qsparse.kernels._load import launched, tier_of
from qsparse.sparse.product import SparseWeights

NAN = float("nan")
Parts = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # values, col_indices, row_offsets
Shape = tuple[int, int]


def parts(w: scipy.sparse.csr_array, dtype: torch.dtype, device) -> Parts:
    """A CSR matrix as the faces take it."""
    indices = (torch.from_numpy(array.astype(np.int32)).to(device) for array in (w.indices, w.indptr))
    return torch.from_numpy(w.data.astype(np.float32)).to(device, dtype), *indices


def row_of_each(w: Parts) -> torch.Tensor:
    counts = w[2].diff()
    return torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32, device=counts.device), counts)


def by_csr(x, w: Parts, shape: Shape):
    return kernels.spmm_csr(x, *w, shape=shape)


def by_csr_with_a_plan(x, w: Parts, shape: Shape):
    """Indices of 16 bits, a plan, and y column-major: ``W @ X``."""
    columns = w[1].to(torch.uint16)
    plan = kernels.spmm_csr.plan(columns, w[2], shape=shape)
    options = {"shape": shape, "plan": plan, "columns": True}
    return kernels.spmm_csr(x.t().contiguous().t(), w[0], columns, w[2], **options)


def by_csr_highest(x, w: Parts, shape: Shape):
    return kernels.spmm_csr(x, *w, shape=shape, precision="highest")


def by_coo(x, w: Parts, shape: Shape):
    """Entries in no order."""
    order = torch.randperm(len(w[0]), generator=torch.Generator().manual_seed(3)).to(x.device)
    return kernels.spmm_coo(x, w[0][order], row_of_each(w)[order], w[1][order], shape=shape)


def by_transposed(x, w: Parts, shape: Shape):
    """The gradient of the input of a layer whose weights are the transpose."""
    n, k = shape
    cols, order = torch.sort(w[1], stable=True)
    offsets = torch.searchsorted(cols, torch.arange(k + 1, dtype=torch.int32, device=cols.device)).int()
    transposed = w[0][order], row_of_each(w)[order], offsets
    layer = nn.SparseLinear.from_csr(*transposed, shape=(k, n)).make_trainable()
    given = torch.zeros(len(x), n, dtype=x.dtype, device=x.device, requires_grad=True)
    (gradient,) = torch.autograd.grad(layer(given), given, x)
    return gradient


def by_bitmap(x, w: Parts, shape: Shape):
    return kernels.spmm_bitmap(x, *sparse.csr_to_bitmap_tiles(*w, shape), shape=shape)


@contextlib.contextmanager
def as_on_any_card() -> Iterator[None]:
    """Inside, the kernels of cards before 8.0 are taken, which no newer card would take by itself."""
    with mock.patch.object(_spmm, "has_sm80", return_value=False), launched() as seen:
        yield
    assert {tier_of(name.partition(":")[0]) for name in seen} <= {"simt"}


def on_any_card(way: Callable) -> Callable:
    def run(x, w: Parts, shape: Shape):
        with as_on_any_card():
            return way(x, w, shape)

    return run


LEAVE_OUT: dict[str, Callable] = {  # what is not stored contributes nothing
    "csr": by_csr,
    "csr, plan": by_csr_with_a_plan,
    "csr, highest": by_csr_highest,
    "coo": by_coo,
    "transposed": by_transposed,
}
ON_ANY_CARD = {
    "csr, simt": on_any_card(by_csr_with_a_plan),
    "coo, simt": on_any_card(by_coo),
    "transposed, simt": on_any_card(by_transposed),
}
WAYS = {**LEAVE_OUT, **ON_ANY_CARD, "bitmap": by_bitmap}  # which multiplies zeros, and says so
LEAVING_OUT = [
    *(("cpu", name) for name in LEAVE_OUT),
    *(pytest.param(("cuda", name), marks=pytest.mark.gpu) for name in (*LEAVE_OUT, *ON_ANY_CARD)),
]


@pytest.fixture(params=[*LEAVING_OUT, ("cpu", "bitmap"), pytest.param(("cuda", "bitmap"), marks=pytest.mark.gpu)])
def place(request) -> tuple[str, str]:
    """The device, and the way to multiply there."""
    return request.param


@pytest.fixture
def device(place) -> torch.device:
    return torch.device(place[0], 0 if place[0] == "cuda" else None)


@pytest.fixture
def multiply(place) -> Callable:
    return WAYS[place[1]]


@pytest.fixture
def check(multiply, normal, assert_close, to_numpy):
    """``check(w, dtype, device)``: some batches times a SciPy matrix, by the way and by SciPy."""

    def run(w: scipy.sparse.csr_array, dtype: torch.dtype, device) -> None:
        for m in (1, 9, 70):
            x = normal(m, w.shape[1], dtype=dtype, device=device)
            values, *indices = parts(w, dtype, device)
            if m * np.count_nonzero(np.diff(w.indptr)) < 100:  # too few outputs for one that cancels to be lost among
                x, values = x.abs(), values.abs()
            y = multiply(x, (values, *indices), w.shape)
            assert y.dtype == dtype
            assert y.device == device
            exact = scipy.sparse.csr_array((values.double().cpu().numpy(), w.indices, w.indptr), shape=w.shape)
            assert_close(y, (exact @ to_numpy(x).T).T)

    return run


def random_csr(n: int, k: int, density: float, seed: int) -> scipy.sparse.csr_array:
    generator = np.random.default_rng(seed)
    normal = {"rng": generator, "data_sampler": lambda size: generator.standard_normal(size)}
    return scipy.sparse.random_array((n, k), density=density, format="csr", **normal)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16], ids=str)
def test_random_shapes_and_densities(device, dtype, check):
    generator = np.random.default_rng(8)
    for seed in range(8):
        n, k = (int(size) for size in generator.integers(1, 301, 2))
        check(random_csr(n, k, float(generator.uniform(0, 0.6)), seed), dtype, device)


def with_a_dense_row() -> scipy.sparse.csr_array:
    counts = np.zeros(10_001, np.int32)
    counts[7000] = 300
    values = np.random.default_rng(1).standard_normal(300)
    return scipy.sparse.csr_array((values, np.arange(300), np.concatenate(([0], counts.cumsum()))), shape=(10_001, 300))


def with_repeated_entries() -> scipy.sparse.csr_array:
    """Columns in no order, some of them three times in a row."""
    generator = np.random.default_rng(2)
    offsets = np.arange(0, 31 * 40, 40)
    values, columns = generator.standard_normal(30 * 40), generator.integers(0, 25, 30 * 40)
    return scipy.sparse.csr_array((values, columns, offsets), shape=(30, 25))


def with_stored_zeros() -> scipy.sparse.csr_array:
    w = random_csr(40, 60, 0.3, 5)
    w.data[::3] = 0
    assert w.nnz == w.data.size
    return w


def nothing(n: int, k: int) -> scipy.sparse.csr_array:
    return scipy.sparse.csr_array((n, k), dtype=np.float64)


CASES = {
    "nothing stored": lambda: nothing(7, 9),
    "no rows": lambda: nothing(0, 5),
    "no columns": lambda: nothing(5, 0),
    "neither": lambda: nothing(0, 0),
    "one dense row among 10,000 empty ones": with_a_dense_row,
    "a single column": lambda: random_csr(500, 1, 0.3, 3),
    "a single row": lambda: random_csr(1, 500, 0.3, 4),
    "every second row empty": lambda: scipy.sparse.kron(random_csr(30, 50, 0.4, 6), [[1], [0]], format="csr"),
    "fully dense": lambda: random_csr(40, 50, 1.0, 7),
    "zeros that are stored": with_stored_zeros,
    "unsorted and repeated columns": with_repeated_entries,
}


@pytest.mark.parametrize("case", CASES)
def test_what_can_be_stored(device, case, check):
    w = scipy.sparse.csr_array(CASES[case]())
    for dtype in (torch.float32, torch.float16):
        check(w, dtype, device)


@pytest.mark.parametrize("place", LEAVING_OUT, indirect=True, ids=str)
def test_nan_of_x_meets_what_is_stored_and_nothing_else(device, multiply, normal):
    w = random_csr(60, 50, 0.2, 9)
    touched = torch.from_numpy(w.toarray()[:, 5] != 0)
    assert touched.any()
    assert not touched.all()
    for m in (2, 20, 100):
        x = normal(m, 50, device=device)
        x[1, 5] = NAN
        y = multiply(x, parts(w, torch.float32, device), w.shape).cpu()
        assert torch.equal(y[1].isnan(), touched)
        assert y[[row for row in range(m) if row != 1]].isfinite().all()


@pytest.mark.parametrize(
    "place",
    [("cpu", ""), *(pytest.param(("cuda", tier), marks=pytest.mark.gpu) for tier in ("", "simt"))],
    indirect=True,
    ids=str,
)
@pytest.mark.parametrize("case", CASES)
def test_the_gradient_of_what_is_stored(device, place, case, normal, assert_close, to_numpy):
    w = scipy.sparse.csr_array(CASES[case]())
    n, k = w.shape
    rows = np.repeat(np.arange(n), np.diff(w.indptr))
    for m, dtype in ((0, torch.float32), (9, torch.float32), (70, torch.float16)):
        dy, x = normal(m, n, dtype=dtype, device=device), normal(m, k, dtype=dtype, device=device)
        with as_on_any_card() if place[1] == "simt" else contextlib.nullcontext():
            gradient = kernels.sddmm(dy, x, *parts(w, dtype, device)[1:])
        dense_dy, dense_x = to_numpy(dy), to_numpy(x)
        assert_close(gradient, np.einsum("me,me->e", dense_dy[:, rows], dense_x[:, w.indices]))


# --- outputs of more elements than an int32 counts ------------------------------------------------------------------

TALL, WIDE = 66_000, 33_000  # rows of x, and of W, each of which holds one entry, 1


@pytest.fixture
def unpoisoned(_poisoned_outputs):
    """Filling outputs of gigabytes is no part of this."""
    torch.use_deterministic_algorithms(False)


@pytest.mark.gpu
@pytest.mark.usefixtures("unpoisoned")
@pytest.mark.parametrize("way", ["csr", "csr, plan", "coo", "bitmap"])
def test_more_outputs_than_an_int32_counts_do_not_wrap(way, normal):
    device, k = torch.device("cuda", 0), 16
    assert TALL * WIDE > 2**31
    if torch.cuda.mem_get_info()[0] < 24e9:
        pytest.skip("it takes 24 GB of the GPU's memory")
    columns = torch.arange(WIDE, dtype=torch.int32, device=device) % k
    offsets = torch.arange(WIDE + 1, dtype=torch.int32, device=device)
    w = torch.ones(WIDE, dtype=torch.float16, device=device), columns, offsets
    x = normal(TALL, k, dtype=torch.float16, device=device)
    y = WAYS[way](x, w, (WIDE, k))
    assert y.shape == (TALL, WIDE)
    for m in (0, 1, TALL // 2, 2**31 // WIDE, TALL - 1):  # the fourth holds element 2^31
        assert torch.equal(y[m], x[m, columns.long()])
    for n in (0, WIDE // 2, WIDE - 1):
        assert torch.equal(y[:, n], x[:, n % k])


@pytest.mark.parametrize("face", ["spmm_csr", "plan", "spmm_coo", "sddmm"])
def test_more_entries_than_kernels_can_count_are_refused(face, device):
    """By their number: nothing is read, and no memory needed."""
    nnz, most = 2**31 - 2**14 + 1, 2**31 - 2**14
    cols = torch.zeros(1, dtype=torch.int32, device=device).expand(nnz)
    offsets, x = torch.tensor([0, nnz], dtype=torch.int32, device=device), torch.zeros(4, 6, device=device)
    values, options = x[0, :1].expand(nnz), {"shape": (1, 6), "check": False}
    takers = {
        "spmm_csr": lambda: kernels.spmm_csr(x, values, cols, offsets, **options),
        "plan": lambda: kernels.spmm_csr.plan(cols, offsets, shape=(1, 6)),
        "spmm_coo": lambda: kernels.spmm_coo(x, values, cols, cols, **options),
        "sddmm": lambda: kernels.sddmm(x[:, :1], x, cols, offsets, check=False),
    }
    with pytest.raises(ValueError, match=rf"^W may have {most} entries at most, got {nnz}$"):
        takers[face]()


def _takers_of_shape(device, normal):
    """Whatever takes the shape of W, given an empty W (5, 6)."""
    x, values, none = normal(4, 6, device=device), normal(0, device=device), torch.zeros(0, dtype=torch.int32)
    cols, row_offsets = none.to(device), torch.zeros(6, dtype=torch.int32, device=device)
    tiles = (array.to(device) for array in _bitmap_tiles.pack(torch.zeros(5, 6), torch.zeros(5, 6) > 0))
    return {
        "spmm_csr": functools.partial(kernels.spmm_csr, x, values, cols, row_offsets),
        "plan": functools.partial(kernels.spmm_csr.plan, cols, row_offsets),
        "spmm_coo": functools.partial(kernels.spmm_coo, x, values, cols, cols),
        "spmm_bitmap": functools.partial(kernels.spmm_bitmap, x, *tiles),
        "SparseWeights": functools.partial(SparseWeights, values, cols, row_offsets),
    }


@pytest.mark.parametrize("face", ["spmm_csr", "plan", "spmm_coo", "spmm_bitmap", "SparseWeights"])
def test_a_shape_is_two_whole_numbers(device, face, normal):
    take = _takers_of_shape(device, normal)[face]
    for wrong in ((5.0, 6), (5, 6.0), (NAN, 6), ("5", 6), (True, 6), (None, 6), ((5,), 6), None, 5, "56"):
        with pytest.raises(TypeError, match=r"^shape must be two whole numbers \(N, K\), got "):
            take(shape=wrong)
    for wrong in ((), (5,), (5, 6, 1), (-1, 6), (5, -6)):
        with pytest.raises(ValueError, match=r"^shape must be two sizes \(N, K\), neither below 0, got "):
            take(shape=wrong)
    with pytest.raises(ValueError, match=r"does not fit int32 indices$"):
        take(shape=(2**31, 6))
    for right in ((5, 6), [5, 6], torch.Size((5, 6)), np.array((5, 6)), (np.int64(5), torch.tensor(6))):
        take(shape=right)
