"""Row-wise quantization: the oracle's bits, always."""

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qsparse import kernels
from qsparse.oracles.quantize_rows import quantize_rows as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def check(assert_same_bits):
    """Quantize, compare both outputs with the oracle's bits, and return them on the CPU."""

    def run(x: torch.Tensor):
        q, scale = kernels.quantize_rows(x)
        assert q.device == scale.device == x.device
        assert q.is_contiguous()
        expected_q, expected_scale = oracle(x.float().cpu().numpy())
        assert_same_bits(q, expected_q)
        assert_same_bits(scale, expected_scale)
        return q.cpu(), scale.cpu()

    return run


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape", [(0, 5), (5, 0), (0, 0), (1, 1), (3, 7), (5, 255), (4, 256), (9, 257), (300, 784), (2, 5000)], ids=str
)
def test_matches_the_oracle_to_the_bit(device, dtype, shape, normal, check):
    q, scale = check(normal(*shape, dtype=dtype, device=device))
    if shape[1]:
        assert (q.abs().amax(1) == 127).all()
    else:
        assert (scale == 1).all()


@pytest.mark.parametrize("exponent", [-20, -3, 0, 5, 30])
def test_ties_round_to_even(device, exponent, check):
    """With 127 in the row the scale is a power of two, so x / scale is exactly a half-integer."""
    halves = torch.arange(-253, 254, device=device) / 2
    q, scale = check((torch.cat((halves, halves.new_tensor([127.0]))) * 2.0**exponent)[None])
    assert scale.item() == 2.0**exponent
    assert q[0, :5].tolist() == [-126, -126, -126, -125, -124]  # -126.5, -126, -125.5 -> -126, ...


def test_case_6_zeros(device, check):
    x = torch.zeros(3, 40, device=device)
    x[1] = torch.linspace(-2, 2, 40)
    q, scale = check(x)
    assert scale[[0, 2]].tolist() == [1, 1]
    assert (q[[0, 2]] == 0).all()
    assert (check(-x)[0][[0, 2]] == 0).all()


@pytest.mark.parametrize("constant", [1.0, -3.25, 1e-30, 3.4e38, -3.4e38])
def test_constant_rows(device, constant, check):
    q, scale = check(torch.full((2, 33), constant, device=device))
    assert (q == (127 if constant > 0 else -127)).all()
    assert scale.isfinite().all()


def test_tiny_rows_have_scale_one(device, check):
    """The boundary is a scale of the smallest normal float, an absmax of 127 times that; denormals lie far below."""
    tiny = torch.finfo(torch.float32).tiny
    x = torch.tensor([[1e-45, 0], [tiny, -tiny], [126 * tiny, 0], [127 * tiny, tiny], [128 * tiny, 64 * tiny]])
    q, scale = check(x.to(device))
    assert (scale[:3] == 1).all()
    assert (q[:3] == 0).all()
    assert (scale[3:] < 1e-37).all()
    assert q[3].tolist() == [127, 1]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("value", [NAN, INF, -INF])
def test_case_9_only_the_row_with_a_nan_or_inf_is_lost(device, dtype, value, normal, check):
    x = normal(5, 300, dtype=dtype, device=device)
    clean_q, clean_scale = check(x)
    x[2, 299] = value
    q, scale = check(x)
    others = [0, 1, 3, 4]
    assert torch.equal(q[others], clean_q[others])
    assert torch.equal(scale[others], clean_scale[others])
    assert scale[2].isnan()
    assert (q[2] == 0).all()


def test_half_extremes(device, check):
    for dtype in (torch.float16, torch.bfloat16):
        info = torch.finfo(dtype)
        rows = [[info.max, info.min], [info.tiny, 0], [info.smallest_normal / 4, 0], [1, -0.0]]
        check(torch.tensor(rows, dtype=dtype, device=device))


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_12_views(device, dtype, normal, check):
    x = normal(20, 31, dtype=dtype, device=device)
    for view in (x.t(), x[::2], x[:, 1:], x[:, ::3], x.flip(0), x[:1].expand(7, -1), x[:, :1].expand(-1, 9), x[:1, :1]):
        check(view)
    check(x.flatten().as_strided((1, 5), (3, 2)))


@settings(max_examples=60, deadline=None, derandomize=True, database=None)
@given(hnp.arrays(np.float32, hnp.array_shapes(min_dims=2, max_dims=2, max_side=12), elements=st.floats(width=32)))
def test_any_floats_on_the_cpu(x):
    q, scale = kernels.quantize_rows(x)
    expected_q, expected_scale = oracle(x)
    assert np.array_equal(q, expected_q)
    assert np.array_equal(scale, expected_scale, equal_nan=True)


def test_error_is_at_most_half_a_step(device, normal):
    x = normal(50, 300, device=device)
    q, scale = kernels.quantize_rows(x)
    error = (q.double() * scale.double()[:, None] - x.double()).abs()
    assert (error <= 0.5001 * scale.double()[:, None]).all()


def test_refuses_what_does_not_fit(device):
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got int8"):
        kernels.quantize_rows(torch.zeros((2, 2), dtype=torch.int8, device=device))
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got float64"):
        kernels.quantize_rows(torch.zeros((2, 2), dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match=r"^x must have shape \(any, any\), got \(2,\)"):
        kernels.quantize_rows(torch.zeros(2, device=device))
    with pytest.raises(TypeError, match=r"^x must be an? .*array.* got NoneType"):
        kernels.quantize_rows(None)
