"""Row-wise quantization: the oracle's bits, always."""

import importlib

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from qsparse import kernels
from qsparse.oracles.quantize_rows import quantize_rows as oracle

MODULE = importlib.import_module("qsparse.kernels.quantize_rows")  # the package's attribute is the function
DTYPES = [torch.float32, torch.float16, torch.bfloat16]
SHAPES = [(0, 5), (5, 0), (0, 0), (1, 1), (3, 7), (5, 255), (4, 256), (9, 257), (300, 784), (2, 5000), (1, 70_000)]
NAN, INF = float("nan"), float("inf")
OPTIONS = [
    {"symmetric": symmetric, "relu": relu, "return_sums": relu == symmetric}
    for symmetric in (True, False)
    for relu in (False, True)
] + [{"return_sums": True}]  # fmt: skip


@pytest.fixture
def check(assert_same_bits):
    """Quantize in every way, compare all with the oracle's bits; returns the symmetric q and scale, on the CPU."""

    def run(x: torch.Tensor, scale: float | None = None):
        given = None if scale is None else torch.tensor([scale], device=x.device)
        reference = x.float().cpu().numpy()
        for options in OPTIONS:
            outputs = kernels.quantize_rows(x, given, **options)
            expected = oracle(reference, scale, **options)
            assert len(outputs) == len(expected)
            assert outputs[0].is_contiguous()
            for ours, theirs in zip(outputs, expected, strict=True):
                assert ours.device == x.device
                assert_same_bits(ours, theirs)
        q, scales = kernels.quantize_rows(x, given)
        return q.cpu(), scales.cpu()

    return run


@pytest.mark.parametrize("dtype", DTYPES)
def test_matches_the_oracle_to_the_bit(device, dtype, normal, check):
    for shape in SHAPES:
        q, scale = check(normal(*shape, dtype=dtype, device=device))
        if shape[1]:
            assert (q.abs().amax(1) == 127).all()
        else:
            assert (scale == 1).all()


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*MODULE.CONFIGS, MODULE.UNALIGNED], ids=str)
def test_every_way_to_hold_a_row(config, normal, check, monkeypatch):
    """Rows below, at and beyond what a configuration holds in registers."""
    monkeypatch.setattr(MODULE, "choose", lambda *_: config)
    for dtype in DTYPES:
        span = config.threads * config.items * (16 // dtype.itemsize if config.vector else 1)
        step = 16 // dtype.itemsize if config.vector else 1
        rows = 19 if config.threads < 128 else 3  # more than a block's, fewer than two blocks'
        for k in (step, span - step, span, span + step, 2 * span + 3 * step):
            check(normal(rows, k, dtype=dtype, device="cuda"))


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_given_scale(device, dtype, normal, check):
    for scale in (0.01, 1.0, 1e-3, 3e-38, 1e-40, 1e31, 0.0, -0.5, NAN, INF):
        x = normal(40, 96, dtype=dtype, device=device)
        x[3, 5], x[4, 6], x[5, 95] = NAN, INF, -INF
        q, scales = check(x, scale)
        assert scales[[3, 4, 5]].isnan().all()
        assert (q[[3, 4, 5]] == 0).all()
        if scale == 0.01:
            assert set(q[:3].abs().amax(1).tolist()) == {127}  # clipped, not wrapped


def test_a_given_scale_divides_exactly(device, check):
    """Quotients one unit in the last place beside every half-integer, of scales with all kinds of mantissas."""
    generator = torch.Generator().manual_seed(3)
    for scale in (*(torch.rand(20, generator=generator) + 0.5).tolist(), 1.0, 0.75, 0.99999994, 1.1754944e-30):
        scale = float(torch.tensor(scale, dtype=torch.float32))
        halves = (torch.arange(-260, 261).double() / 2 * scale).float()
        around = [halves]
        for direction in (-INF, INF):
            near = halves
            for _ in range(2):
                near = torch.nextafter(near, torch.tensor(direction))
                around.append(near)
        check(torch.stack(around).to(device), scale)


def test_what_the_range_of_an_asymmetric_row_is(device):
    x = torch.tensor([[-1.0, 3.0], [2.0, 3.0], [-3.0, -2.0], [0.0, 0.0], [-127.5, 127.5]], device=device)
    q, scale, zero = kernels.quantize_rows(x, symmetric=False)
    assert q.tolist() == [[0, 255], [170, 255], [0, 85], [0, 0], [0, 255]]
    assert zero.tolist() == [64, 0, 255, 0, 128]
    assert scale[3] == 1
    assert kernels.quantize_rows(x, symmetric=False, relu=True)[2].tolist() == [0] * 5


def test_relu_on_the_way_in(device, normal, check):
    for nan in (NAN, -NAN):
        x = normal(4, 65, device=device)
        x[1, 3] = -INF  # gone
        x[2, 3] = torch.tensor(nan).copysign(torch.tensor(nan))
        q, scale = kernels.quantize_rows(x, relu=True)
        assert scale.isnan().tolist() == [False, False, True, False]
        assert (q >= 0).all()
        assert torch.equal(q[0], kernels.quantize_rows(x[:1].relu())[0][0])
        check(x)


def test_every_power_of_two(device, normal, check):
    """Scales from the smallest normal float to the largest, beyond where the division can be had by a reciprocal."""
    exponents = torch.arange(-145, 127, device=device)[:, None]
    check(torch.ldexp(normal(len(exponents), 36, device=device).clamp_(-1.9, 1.9), exponents))


def test_ties_round_to_even(device, check):
    """With 127 in the row the scale is a power of two, so x / scale is exactly a half-integer."""
    for exponent in (-20, -3, 0, 5, 30):
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


def test_constant_rows(device, check):
    for constant in (1.0, -3.25, 1e-30, 3.4e38, -3.4e38):
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
def test_case_9_only_the_row_with_a_nan_or_inf_is_lost(device, dtype, normal, check):
    for value in (NAN, INF, -INF):
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
    for options in OPTIONS:
        for ours, theirs in zip(kernels.quantize_rows(x, **options), oracle(x, **options), strict=True):
            assert np.array_equal(ours, theirs, equal_nan=True)


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
    x = torch.zeros((2, 2), device=device)
    with pytest.raises(ValueError, match=r"^scale must have shape \(1,\), got \(2,\)"):
        kernels.quantize_rows(x, torch.ones(2, device=device))
    with pytest.raises(TypeError, match=r"^scale must be float32, got float64"):
        kernels.quantize_rows(x, torch.ones(1, dtype=torch.float64, device=device))
    with pytest.raises(ValueError, match=r"^return_sums is possible up to K = 8421504 \(K is 8421505\)"):
        kernels.quantize_rows(torch.zeros((1, 1), device=device).expand(1, 8_421_505), return_sums=True)


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="a row is part of a warp's, a warp's, or a block's"):
        MODULE.Config(48, 4)
    assert MODULE.choose(60_000, 784 * 4, 132) == MODULE.Config(32, 8)
    assert MODULE.choose(1, 784 * 4, 132) == MODULE.Config(128, 4)
    assert MODULE.choose(8192, 8192 * 4, 132) == MODULE.Config(256, 8)
    assert MODULE.choose(1, 10**6, 132) == MODULE.CONFIGS[-1]
