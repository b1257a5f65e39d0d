"""The dense product against its oracle: dtypes, shapes, views, and what it refuses."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse import kernels
from qsparse.oracles.gemm import gemm as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# M, N, K: nothing, one, odd, a tile and its neighbours, several tiles each way, and the head of an MNIST network.
SHAPES = [
    (0, 5, 3),
    (4, 0, 3),
    (4, 5, 0),
    (0, 0, 0),
    (1, 1, 1),
    (1, 10, 784),
    (3, 5, 7),
    (8, 8, 8),
    (63, 65, 15),
    (64, 64, 16),
    (65, 64, 17),
    (128, 256, 64),
    (129, 257, 65),
    (130, 131, 100),
    (300, 520, 200),
    (257, 10, 783),
    (33, 900, 1025),
]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_oracle(device, dtype, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    x, w = normal(m, k, dtype=dtype, device=device), normal(n, k, dtype=dtype, device=device)
    y = kernels.gemm(x, w)
    assert y.dtype == dtype
    assert y.device == device
    assert y.is_contiguous()
    assert_close(y, oracle(to_numpy(x), to_numpy(w)))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", [(3, 5, 0), (1, 10, 784), (65, 67, 33), (200, 256, 128)], ids=str)
def test_bias_and_relu(device, dtype, relu, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    x, w, bias = (normal(*size, dtype=dtype, device=device) for size in ((m, k), (n, k), (n,)))
    reference = oracle(to_numpy(x), to_numpy(w), to_numpy(bias), relu=relu)
    assert (reference == 0).any() == relu
    assert_close(kernels.gemm(x, w, bias, relu=relu), reference)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", [(1, 1, 1), (5, 3, 7), (64, 64, 64), (130, 70, 33), (256, 128, 192)], ids=str)
def test_backward_products_take_transposed_views(device, dtype, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    dy, w, x = (normal(*size, dtype=dtype, device=device) for size in ((m, n), (n, k), (m, k)))
    assert_close(kernels.gemm(dy, w.t()), oracle(to_numpy(dy), to_numpy(w).T))
    assert_close(kernels.gemm(dy.t(), x.t()), oracle(to_numpy(dy).T, to_numpy(x).T))
    assert_close(kernels.gemm(x.t().contiguous().t(), w), oracle(to_numpy(x), to_numpy(w)))


# Each takes a (2R, 2C) matrix and gives a view of shape (R, C).
VIEWS = {
    "every second row": lambda a: a[::2, : a.shape[1] // 2],
    "every second column": lambda a: a[: a.shape[0] // 2, ::2],
    "off by one element": lambda a: a[1 : 1 + a.shape[0] // 2, 1 : 1 + a.shape[1] // 2],
    "flipped": lambda a: a.flip(0).flip(1)[: a.shape[0] // 2, : a.shape[1] // 2],
    "transposed": lambda a: a.reshape(a.shape[1], a.shape[0]).t()[::2, ::2],
    "one row for all": lambda a: a[:1, : a.shape[1] // 2].expand(a.shape[0] // 2, -1),
    "one column for all": lambda a: a[: a.shape[0] // 2, :1].expand(-1, a.shape[1] // 2),
    "one element for all": lambda a: a[:1, :1].expand(a.shape[0] // 2, a.shape[1] // 2),
    "overlapping rows": lambda a: a.as_strided((a.shape[0] // 2, a.shape[1] // 2), (1, 1)),
}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("view", VIEWS)
def test_case_12_views(device, dtype, view, normal, to_numpy, assert_close):
    x, w = normal(140, 66, dtype=dtype, device=device), normal(40, 66, dtype=dtype, device=device)
    bias = normal(40, dtype=dtype, device=device)[::2]
    for x_view in (x[:70, :33], VIEWS[view](x)):
        for w_view in (w[:20, :33], VIEWS[view](w)):
            reference = oracle(to_numpy(x_view), to_numpy(w_view), to_numpy(bias))
            assert_close(kernels.gemm(x_view, w_view, bias), reference)


@pytest.mark.parametrize("shape", [(1, 6, 5), (6, 1, 5), (6, 5, 1), (1, 1, 1), (1, 1, 70)], ids=str)
def test_odd_strides_of_dimensions_of_size_one(device, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    x_storage, w_storage = normal(200, device=device).abs(), normal(200, device=device).abs()  # nothing cancels
    x = x_storage.as_strided((m, k), (1 if m == 1 else k, 1 if k > 1 else 0))
    w = w_storage.as_strided((n, k), (3 if n == 1 else k, 1 if k > 1 else 7))
    assert_close(kernels.gemm(x, w), oracle(to_numpy(x), to_numpy(w)))
    x = x_storage.as_strided((k, m), (1 if k == 1 else m, 1)).t()
    assert_close(kernels.gemm(x, w), oracle(to_numpy(x), to_numpy(w)))


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("relu", [False, True])
def test_case_9_what_is_not_finite_stays_in_its_row(device, value, relu, normal):
    x, w = normal(70, 40, device=device), normal(66, 40, device=device)
    clean = kernels.gemm(x, w, relu=relu)
    x[3, 5] = value
    y = kernels.gemm(x, w, relu=relu)
    others = [m for m in range(70) if m != 3]
    assert torch.equal(y[others], clean[others])
    expected = value * w[:, 5].double()
    if relu:
        expected = torch.where(expected < 0, 0, expected)
    assert torch.equal(y[3].double(), expected) or (expected.isnan().all() and y[3].isnan().all())


def test_nan_in_weights_and_bias_propagates(device, normal):
    x, w, bias = normal(5, 8, device=device), normal(6, 8, device=device), normal(6, device=device)
    w[2, 3] = bias[4] = float("nan")
    y = kernels.gemm(x, w, bias, relu=True)
    assert y.isnan().any(0).tolist() == [False, False, True, False, True, False]
    assert y.isnan().all(0).tolist() == [False, False, True, False, True, False]


def test_sums_are_held_in_float32(device):
    """4096 ones and one 2048: in float16 the running sum would stop at 2048, where 1 is below half an ulp."""
    x = torch.ones(1, 4097, dtype=torch.float16, device=device)
    x[0, 0] = 2048
    assert kernels.gemm(x, torch.ones_like(x)).item() == 2048 + 4096


def test_same_bits_every_run(device, normal):
    x, w = normal(100, 300, device=device), normal(90, 300, device=device)
    assert torch.equal(kernels.gemm(x, w), kernels.gemm(x, w))


@settings(max_examples=30, deadline=None, derandomize=True, database=None)
@given(m=st.integers(0, 40), n=st.integers(0, 40), k=st.integers(0, 70), seed=st.integers(0, 99), relu=st.booleans())
def test_any_shape_on_the_cpu(m, n, k, seed, relu):
    generator = np.random.default_rng(seed)
    x, w, bias = (generator.standard_normal(size).astype(np.float32) for size in ((m, k), (n, k), (n,)))
    y = kernels.gemm(x, w, bias, relu=relu)
    reference = oracle(x, w, bias, relu=relu)
    assert y.shape == (m, n)
    assert (np.abs(y - reference) < 1e-5 * (1 + k)).all()


def test_refuses_what_does_not_fit(device, normal):
    x, w = normal(4, 6, device=device), normal(5, 6, device=device)
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got float64"):
        kernels.gemm(x.double(), w.double())
    with pytest.raises(TypeError, match=r"^w must be float32, got float16"):
        kernels.gemm(x, w.half())
    with pytest.raises(TypeError, match=r"^bias must be float32, got int64"):
        kernels.gemm(x, w, torch.zeros(5, dtype=torch.int64, device=device))
    with pytest.raises(TypeError, match=r"^x must be an? .*array.* got list"):
        kernels.gemm([[1.0]], w)
    with pytest.raises(ValueError, match=r"^x must have shape \(any, any\), got \(6,\)"):
        kernels.gemm(x[0], w)
    with pytest.raises(ValueError, match=r"^w must have shape \(any, 6\), got \(5, 4\)"):
        kernels.gemm(x, w[:, :4])
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(4,\)"):
        kernels.gemm(x, w, x[:, 0])
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(1, 5\)"):
        kernels.gemm(x, w, w[:, :1].t())
