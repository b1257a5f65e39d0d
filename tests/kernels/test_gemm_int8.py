"""The int8 product: exact integers whatever the shape, and a float epilogue that CPU and GPU share to the bit."""

import functools
import importlib
import itertools
import types
import warnings

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from qsparse import kernels
from qsparse.kernels import _gemm_int8_cpu, _gemm_int8_sm80, _load
from qsparse.kernels._gemm_int8_epilogue import OUT_DTYPES, Epilogue
from qsparse.oracles.gemm_int8 import accumulator
from qsparse.oracles.gemm_int8 import gemm_int8 as oracle

MODULE = importlib.import_module("qsparse.kernels.gemm_int8")  # the package's attribute of that name is the function
METHODS = ("torch._int_mm", "float32 slices")
TIERS = tuple(MODULE._TIERS)
INT32_LAST = 131_071  # the longest K whose sums of -128 * -128 stay below 2^31
UINT8_LAST = 65_793  # the same of 255 * -128


@pytest.fixture(params=[*METHODS, *(pytest.param(tier, marks=pytest.mark.gpu) for tier in TIERS)])
def device(request, monkeypatch) -> torch.device:
    """The CPU counts twice, whatever this machine would choose, and the GPU once a tier.

    A tier is the best that may be taken; what it cannot read goes to a lower one.
    """
    monkeypatch.setattr(MODULE, "_routes", {})  # what a better tier could read
    if request.param in METHODS:
        monkeypatch.setattr(_gemm_int8_cpu, "cpu_method", lambda: request.param)
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    best = kernels.gemm_int8.tier(device)
    if TIERS.index(request.param) > TIERS.index(best):
        pytest.skip(f"this GPU's best tier is {best}")
    monkeypatch.setattr(kernels.gemm_int8, "tier", lambda device: request.param)
    return device


def exact(x, w, out_dtype, zero=None):
    zero = None if zero is None else zero.cpu().numpy()
    return torch.from_numpy(accumulator(x.cpu().numpy(), w.cpu().numpy(), zero)).to(out_dtype)


def by_oracle(x, w, scale_x=None, scale_w=None, bias=None, **options):
    """The oracle on tensors."""
    arrays = (x, w, scale_x, scale_w, bias)
    options = {
        name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()
    }
    return oracle(*(None if a is None else a.cpu().numpy() for a in arrays), **options)


def test_cpu_method_is_one_of_two():
    assert MODULE.cpu_method() in METHODS


def test_cases_3_and_24b_exact_for_every_k(device, integers, assert_same_bits):
    for k in (1, 2, 3, 15, 16, 17, 783, 784, 1022, 1023, 1024, 1025, 2048):
        x, w = integers(-128, 128, 17, k, device=device), integers(-128, 128, 10, k, device=device)
        for out_dtype in (torch.int32, torch.int64):
            assert_same_bits(kernels.gemm_int8(x, w, out_dtype=out_dtype), exact(x, w, out_dtype))


def test_random_shapes_up_to_700(device, integers, assert_same_bits):
    """Aligned or not. float64 holds these sums exactly."""
    random = np.random.default_rng(4)
    for _ in range(12):
        m, n, k = (int(size) for size in random.integers(1, 701, 3))
        x, w = integers(-128, 128, m, k, device=device), integers(-128, 128, n, k, device=device)
        expected = (x.cpu().double() @ w.cpu().double().t()).to(torch.int32)
        assert_same_bits(kernels.gemm_int8(x, w, out_dtype=torch.int32), expected)


def test_exact_beyond_int32(device, integers, assert_same_bits):
    for k in (INT32_LAST, INT32_LAST + 1, 133_144, 133_145, 140_000):
        x, w = integers(-128, 128, 5, k, device=device), integers(-128, 128, 10, k, device=device)
        x[0], w[0] = -128, -128
        x[1], w[1] = 127, -127
        y = kernels.gemm_int8(x, w, out_dtype=torch.int64)
        assert y[0, 0] == k * 2**14
        assert_same_bits(y, exact(x, w, torch.int64))
        assert_same_bits(kernels.gemm_int8(x, w), torch.from_numpy(oracle(x.cpu().numpy(), w.cpu().numpy())))


def test_unsigned_activations_never_wrap(device, integers, assert_same_bits):
    for k in (1, 16, 17, 2048, UINT8_LAST, UINT8_LAST + 1, 66_311, 66_312, 70_000):
        x = integers(0, 256, 5, k, dtype=torch.uint8, device=device)
        w = integers(-128, 128, 10, k, device=device)
        x[0], w[0], w[1] = 255, -128, 127
        y = kernels.gemm_int8(x, w, out_dtype=torch.int64)
        assert y[0, :2].tolist() == [-255 * 128 * k, 255 * 127 * k]
        assert_same_bits(y, exact(x, w, torch.int64))
        assert_same_bits(kernels.gemm_int8(x, w), torch.from_numpy(by_oracle(x, w)))
        if k <= UINT8_LAST:
            assert_same_bits(kernels.gemm_int8(x, w, out_dtype=torch.int32), exact(x, w, torch.int32))


def test_unsigned_activations_where_sums_of_weights_leave_int32(device):
    k = 2**24 + 64
    x = torch.full((1, k), 255, dtype=torch.uint8, device=device)
    w = torch.full((1, k), -128, dtype=torch.int8, device=device)
    assert kernels.gemm_int8(x, w, out_dtype=torch.int64).item() == -255 * 128 * k


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_zero_points(device, dtype, normal, integers, assert_same_bits):
    for k, one in itertools.product((1, 15, 48, 784, UINT8_LAST, UINT8_LAST + 1), (True, False)):
        low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
        m, n = 17, 10
        x, w = integers(low, high, m, k, dtype=dtype, device=device), integers(-128, 128, n, k, device=device)
        zero = integers(low, high, 1 if one else m, dtype=torch.int32, device=device)
        x[0], w[0], zero[0] = low, -128, high - 1  # the largest sum there is
        sums = w.sum(1, dtype=torch.int32)
        for kept in (None, sums):
            y = kernels.gemm_int8(x, w, out_dtype=torch.int64, zero_x=zero, sums_w=kept)
            assert y[0, 0] == 255 * 128 * k
            assert_same_bits(y, exact(x, w, torch.int64, zero))
        if k <= UINT8_LAST:
            y = kernels.gemm_int8(x, w, out_dtype=torch.int32, zero_x=zero, relu=True)
            assert_same_bits(y, exact(x, w, torch.int32, zero).clamp(min=0))
        scaling = normal(m, device=device) / 7, normal(n, device=device) / 9, normal(n, device=device) * 100
        y = kernels.gemm_int8(x, w, *scaling, zero_x=zero, sums_w=sums)
        assert_same_bits(y, by_oracle(x, w, *scaling, zero_x=zero))


def test_case_4_all_entries_127(device):
    lengths = (1, 15, 16, 17, 783, 2048, INT32_LAST, INT32_LAST + 1, 133_144, 133_145, 140_000)
    for k, sign in itertools.product(lengths, (1, -1)):
        x = torch.full((2, k), 127, dtype=torch.int8, device=device)
        w = torch.full((3, k), sign * 127, dtype=torch.int8, device=device)
        out_dtype = torch.int32 if k <= INT32_LAST else torch.int64
        assert (kernels.gemm_int8(x, w, out_dtype=out_dtype) == sign * 127 * 127 * k).all()


def test_int32_is_refused_where_it_can_overflow(device):
    x = torch.zeros((1, INT32_LAST + 1), dtype=torch.int8, device=device)
    with pytest.raises(ValueError, match=r"^out_dtype int32 can overflow beyond K = 131071 \(K is 131072\)"):
        kernels.gemm_int8(x, x, out_dtype=torch.int32)
    x, zero = x[:, : UINT8_LAST + 1], torch.zeros(1, dtype=torch.int32, device=device)
    kernels.gemm_int8(x, x, out_dtype=torch.int32)
    with pytest.raises(ValueError, match=r"^out_dtype int32 can overflow beyond K = 65793 \(K is 65794\)"):
        kernels.gemm_int8(x, x, out_dtype=torch.int32, zero_x=zero)
    with pytest.raises(ValueError, match=r"^out_dtype int32 can overflow beyond K = 65793 \(K is 65794\)"):
        kernels.gemm_int8(x.view(torch.uint8), x, out_dtype=torch.int32)
    long = torch.zeros((1, 1), dtype=torch.int8, device=device).expand(1, 2**24 + 1)
    with pytest.raises(ValueError, match=r"^zero_x is possible up to K = 16777216 "):
        kernels.gemm_int8(long, long, zero_x=zero)


def test_cases_1_and_2_few_rows_and_few_outputs(device, integers, assert_same_bits):
    for m, n, k in itertools.product((1, 8, 16, 17, 63, 65), (1, 10, 64, 130), (1, 64, 783)):
        x, w = integers(-128, 128, m, k, device=device), integers(-128, 128, n, k, device=device)
        y = kernels.gemm_int8(x, w, out_dtype=torch.int32)
        assert y.device == device
        assert_same_bits(y, exact(x, w, torch.int32))


def test_case_5_empty(device, normal):
    shapes = (0, 10, 784), (5, 0, 784), (5, 10, 0), (0, 0, 0), (0, 10, 0)
    for shape, out_dtype in itertools.product(shapes, (torch.float32, torch.float16, torch.int32, torch.int64)):
        m, n, k = shape
        x, w = (torch.ones(size, dtype=torch.int8, device=device) for size in ((m, k), (n, k)))
        y = kernels.gemm_int8(x, w, out_dtype=out_dtype)
        assert y.dtype == out_dtype
        assert y.shape == (m, n)
        assert (y == 0).all()
        if out_dtype == torch.float32:
            scale_x, scale_w, bias = (normal(size, device=device) for size in (m, n, n))
            y = kernels.gemm_int8(x, w, scale_x, scale_w, bias)
            assert torch.equal(y, bias.expand(m, n))


# The CPU goes through M in slices of 1,024 rows.
@pytest.mark.parametrize("shape", [(1, 10, 784), (17, 1, 33), (65, 67, 100), (1025, 10, 16), (2049, 3, 7)], ids=str)
def test_scaled_output_has_the_oracle_s_bits(device, shape, normal, integers, assert_same_bits):
    for relu, scales in itertools.product((False, True), ("none", "one", "rows", "all")):
        m, n, k = shape
        x, w = integers(-128, 128, m, k, device=device), integers(-128, 128, n, k, device=device)
        arguments = {
            "none": (),
            "one": (normal(1, device=device), normal(1, device=device)),
            "rows": (normal(m, device=device), None, normal(n, device=device) * 100),
            "all": (normal(m, device=device) / 7, normal(n, device=device) / 9, normal(n, device=device) * 100),
        }[scales]
        reference = oracle(*(a if a is None else a.cpu().numpy() for a in (x, w, *arguments)), relu=relu)
        y = kernels.gemm_int8(x, w, *arguments, relu=relu)
        assert y.is_contiguous()
        assert_same_bits(y, reference)


def test_half_outputs_are_the_float32_ones_rounded(device, normal, integers, assert_same_bits):
    for out_dtype, relu in itertools.product((torch.float16, torch.bfloat16), (False, True)):
        x, w = integers(-128, 128, 40, 99, device=device), integers(-128, 128, 30, 99, device=device)
        scaling = normal(40, device=device), normal(30, device=device), normal(30, device=device)
        y = kernels.gemm_int8(x, w, *scaling, relu=relu, out_dtype=out_dtype)
        assert y.isinf().any() == (out_dtype == torch.float16)
        assert_same_bits(y, kernels.gemm_int8(x, w, *scaling, relu=relu).to(out_dtype))


@pytest.mark.parametrize("out_dtype", [torch.int8, torch.uint8])
def test_int8_again(device, out_dtype, normal, integers, assert_same_bits):
    shapes = (40, 30, 99), (65, 130, 784), (1, 10, 16), (300, 257, 64)
    for (m, n, k), relu in itertools.product(shapes, (False, True)):
        x, w = integers(-128, 128, m, k, device=device), integers(-128, 128, n, k, device=device)
        scaling = normal(m, device=device).abs(), normal(n, device=device), normal(n, device=device) * 100
        largest = kernels.gemm_int8(x, w, *scaling).abs().max()
        for clipped in (1, 3):
            scale = (largest / 127 / clipped).reshape(1)
            options = {"relu": relu, "out_dtype": out_dtype}
            y = kernels.gemm_int8(x, w, *scaling, scale_y=scale, **options)
            expected = by_oracle(x, w, *scaling, scale_y=scale, relu=relu, out_dtype=y.cpu().numpy().dtype)
            assert_same_bits(y, expected)
            again, _ = kernels.quantize_rows(kernels.gemm_int8(x, w, *scaling, relu=relu), scale)
            if out_dtype == torch.int8:
                assert torch.equal(y, again)


def test_int8_again_of_what_is_not_finite(device, integers):
    """NaN becomes 0, which 8 bits have no other sign for; what is infinite is clipped."""
    for out_dtype in (torch.int8, torch.uint8):
        x, w = integers(1, 128, 5, 48, device=device), integers(1, 128, 20, 48, device=device)
        scale = torch.tensor([1.0, float("nan"), float("inf"), -float("inf"), 0.0], device=device)
        low, high = (-127, 127) if out_dtype == torch.int8 else (0, 255)
        one = torch.ones(1, device=device)
        y = kernels.gemm_int8(x, w, scale, out_dtype=out_dtype, scale_y=one)
        assert [set(row.tolist()) for row in y] == [{high}, {0}, {high}, {low}, {0}]
        for value, row in ((0.0, high), (float("nan"), 0), (float("inf"), 0), (-1.0, low)):
            y = kernels.gemm_int8(x, w, out_dtype=out_dtype, scale_y=one * value)
            assert (y == row).all(), value


def test_int8_again_rounds_ties_to_even(device):
    """Sums of 1 to 48 divided by two, at scales where the division is by a reciprocal and where it is not."""
    x = torch.tril(torch.ones(48, 48, dtype=torch.int8, device=device))
    w = torch.ones(32, 48, dtype=torch.int8, device=device)
    for scale in (2.0, 6.0, 2.0**-118, 6 * 2.0**118):
        step = torch.full((1,), scale / 2, device=device)
        y = kernels.gemm_int8(x, w, step, out_dtype=torch.int8, scale_y=2 * step)
        assert y[:, 31].tolist() == [round(sum / 2) for sum in range(1, 49)]


def test_a_whole_network_in_8_bits(device, normal, integers, assert_same_bits):
    """Layers chained through uint8 activations, the first asymmetric with row sums for nobody: all exact integers."""
    x, scale_x, zero = kernels.quantize_rows(normal(33, 100, device=device) + 0.5, symmetric=False)
    weights = [kernels.quantize_rows(normal(*size, device=device)) for size in ((64, 100), (64, 64), (10, 64))]
    scales = torch.tensor([0.05, 0.3], device=device)
    given = (x, scale_x)
    numpy = x.cpu().numpy(), scale_x.cpu().numpy()
    zeros = {"zero_x": zero}
    for (w, scale_w), scale in zip(weights, (*scales[:, None], None), strict=True):
        options = {"out_dtype": torch.float32 if scale is None else torch.uint8, "scale_y": scale}
        y = kernels.gemm_int8(given[0], w, given[1], scale_w, relu=scale is not None, **options, **zeros)
        expected = oracle(
            numpy[0], w.cpu().numpy(), numpy[1], scale_w.cpu().numpy(), relu=scale is not None,
            zero_x=zero.cpu().numpy() if zeros else None,
            scale_y=None if scale is None else scale.cpu().numpy(), out_dtype=np.uint8,
        )  # fmt: skip
        assert_same_bits(y, expected)
        given, zeros = (y, scale), {}
        numpy = expected, None if scale is None else scale.cpu().numpy()


def test_relu_on_the_bare_accumulator(device, integers):
    x, w = integers(-128, 128, 40, 9, device=device), integers(-128, 128, 30, 9, device=device)
    for out_dtype in (torch.int32, torch.int64):
        bare = kernels.gemm_int8(x, w, out_dtype=out_dtype)
        assert (bare < 0).any()
        assert torch.equal(kernels.gemm_int8(x, w, relu=True, out_dtype=out_dtype), bare.clamp(min=0))


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("config", _gemm_int8_sm80.CONFIGS, ids=str)
def test_every_configuration_of_sm80(config, dtype, normal, integers, assert_same_bits):
    """Tails in every direction, several tiles, K divided, and outputs whose rows start anywhere."""
    device = torch.device("cuda", 0)
    if kernels.gemm_int8.tier(device) == "simt":
        pytest.skip("this GPU has no sm80 tier")
    low, high = (0, 256) if dtype == torch.uint8 else (-128, 128)
    for (m, n, k), split in (((72, 136, 208), 1), ((300, 519, 784), 1), ((1, 10, 16), 1), ((200, 263, 2048), 3)):
        x, w = integers(low, high, m, k, dtype=dtype, device=device), integers(-128, 128, n, k, device=device)
        zero = integers(low, high, m, dtype=torch.int32, device=device)
        factors = normal(m, device=device) / 7, normal(n, device=device) / 9, normal(n, device=device) * 100
        for out_dtype in OUT_DTYPES:
            if out_dtype == torch.int64:
                continue
            scaling = () if out_dtype == torch.int32 else factors
            one = torch.full((1,), 10.0, device=device) if out_dtype.itemsize == 1 else None
            y = torch.empty((m, n), dtype=out_dtype, device=device)
            values = (*(scaling or (None,) * 3), zero, w.sum(1, dtype=torch.int32), one)
            _gemm_int8_sm80.launch_gemm(x, k, w, k, y, Epilogue(*values, True), config=config, split=split)
            options = {"relu": True, "zero_x": zero, "scale_y": one, "out_dtype": out_dtype}
            assert_same_bits(y, kernels.gemm_int8(x, w, *scaling, **options, tier="simt"))
            if out_dtype == torch.float32:
                assert_same_bits(y, by_oracle(x, w, *scaling, relu=True, zero_x=zero))


@pytest.mark.gpu
@pytest.mark.parametrize("tier", TIERS)
@pytest.mark.parametrize("seed", range(2))
def test_random_shapes_write_all_of_the_output(tier, seed, integers, normal, assert_same_bits):
    """Sizes of 1 to 700, aligned or not, sliced operands: exact integers, and the tiers' outputs agree to the bit."""
    device, random = torch.device("cuda", 0), np.random.default_rng(seed)
    if TIERS.index(tier) > TIERS.index(kernels.gemm_int8.tier(device)):
        pytest.skip("this GPU has no such tier")
    for _ in range(8):
        m, n, k = (int(size) for size in random.integers(1, 701, 3))
        k = k if tier == "simt" else -(-k // 16) * 16
        x = integers(-128, 128, m, k + 16, device=device)[:, :k]
        w = integers(-128, 128, n + 3, k, device=device)[:n]
        with _load.launched() as launches:
            y = kernels.gemm_int8(x, w, out_dtype=torch.int32, tier=tier)
        assert {_load.tier_of(launch.partition(":")[0]) for launch in launches} == {tier}
        assert_same_bits(y, exact(x, w, torch.int32))
        scaling = normal(m, device=device), normal(n, device=device), normal(n, device=device)
        for out_dtype in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8):
            scale = torch.ones(1, device=device) * 50 if out_dtype.itemsize == 1 else None
            outputs = [
                kernels.gemm_int8(x, w, *scaling, relu=seed % 2 == 0, out_dtype=out_dtype, scale_y=scale, tier=name)
                for name in (tier, "simt")
            ]
            assert_same_bits(*outputs)


def test_case_3_rows_off_16_byte_boundaries_reach_the_tensor_cores(device, integers, assert_same_bits):
    """Where there is much to multiply they are copied, with zeros behind K; the zero points know nothing of those."""
    for k in (783, 784, 799):
        x, w = integers(-128, 128, 1000, k, device=device), integers(-128, 128, 256, k, device=device)
        zero = integers(-128, 128, 1000, dtype=torch.int32, device=device)
        with _load.launched() as launches:
            y = kernels.gemm_int8(x, w, out_dtype=torch.int32, zero_x=zero)
        assert_same_bits(y, exact(x, w, torch.int32, zero))
        tiers = {_load.tier_of(launch.partition(":")[0]) for launch in launches}
        assert tiers == ({kernels.gemm_int8.tier(device)} if device.type == "cuda" else set())


def test_a_repeated_call_computes_anew(device, integers, normal, assert_same_bits):
    """The second call of a kind skips the checks: other addresses, arrays and options must not be mistaken for it."""
    memory = integers(-128, 128, 128 * 64 + 16, device=device)
    w, bias = integers(-128, 128, 96, 64, device=device), normal(96, device=device) * 1000
    scales, one = normal(96, device=device), torch.full((1,), 0.5, device=device)
    for offset in (0, 16, 1, 0, 4):  # also off 16-byte boundaries, where another tier must run
        x = memory[offset : offset + 128 * 64].view(128, 64)
        for arguments in ((), (None, scales), (one, scales, bias), (one, one, bias)):
            for relu in (False, True):
                y = kernels.gemm_int8(x, w, *arguments, relu=relu)
                assert_same_bits(y, by_oracle(x, w, *arguments, relu=relu))
    with pytest.raises(TypeError, match=r"^w must be an array"):
        kernels.gemm_int8(x, w.cpu().numpy())
    with pytest.raises(ValueError, match=r"^scale_w must have shape"):
        kernels.gemm_int8(x, w, None, scales[:5])
    x = memory[: 128 * 64].view(128, 64)
    for other, error in no_plain_memory(bias):
        kernels.gemm_int8(x, w, one, scales, bias)
        with pytest.raises(error, match=r"^bias "):
            kernels.gemm_int8(x, w, one, scales, other)


def no_plain_memory(a):
    """Arrays of the layout of ``a`` that are not what their memory holds, and how they are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        yield torch.masked.masked_tensor(a, a > 0), TypeError
    yield torch._neg_view(a), ValueError


def test_a_call_is_known_again_by_the_types_and_signs_of_its_arrays_too(monkeypatch, integers, normal):
    """Else an array that is not what its memory holds would be launched on as if it were."""
    launched = []
    module = types.SimpleNamespace(launch_gemm=lambda *arrays: launched.append(arrays))
    monkeypatch.setattr(MODULE, "_routes", {})
    names = ("x", "w", "scale_x", "scale_w", "bias", "zero_x", "sums_w", "scale_y")
    x, w = integers(-128, 128, 16, 64), integers(-128, 128, 32, 64)
    arrays = (x, w, normal(16), normal(32), normal(32), torch.ones(16).int(), w.sum(1).int(), torch.ones(1))
    MODULE._routes[MODULE._key(arrays, torch.int8)] = module, 64, 64
    call = functools.partial(kernels.gemm_int8, out_dtype=torch.int8)
    call(**dict(zip(names, arrays, strict=True)))
    assert len(launched) == 1
    for at, name in enumerate(names):
        for other, error in no_plain_memory(arrays[at]):
            with pytest.raises(error, match=rf"^{name} "):
                call(**dict(zip(names, (*arrays[:at], other, *arrays[at + 1 :]), strict=True)))
    assert len(launched) == 1


@pytest.mark.gpu
def test_a_tier_that_cannot_be_had_is_refused(integers):
    x, w = integers(-128, 128, 4, 15, device="cuda"), integers(-128, 128, 5, 15, device="cuda")
    with pytest.raises(ValueError, match="tier 'sm80' is not possible for these arguments on this GPU; simt is"):
        kernels.gemm_int8(x, w, tier="sm80")
    kernels.gemm_int8(x, w, tier="simt")


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="y does not fit"):
        _gemm_int8_sm80.Config(128, 128, 64, 32, 64, 3)
    with pytest.raises(ValueError, match=r"not a shape that sm80_tile\.cuh has"):
        _gemm_int8_sm80.Config(128, 128, 32, 64, 64, 3)
    for shape in ((4096, 4096, 4096), (1, 10, 784), (16, 8192, 8192), (60_000, 256, 784)):
        for limit in (99, 163, 227):  # KB a block: 8.6 and 12.0, 8.0, 9.0
            config, split = _gemm_int8_sm80.choose(*shape, 100, limit * 1024, _gemm_int8_sm80.CONFIGS)
            assert config.shared <= limit * 1024
            assert split >= 1


VIEWS = {
    "transposed": lambda a: a.reshape(a.shape[1], a.shape[0]).t()[::2, ::2],
    "every second row": lambda a: a[::2, : a.shape[1] // 2],
    "off by one byte": lambda a: a[1 : 1 + a.shape[0] // 2, 1 : 1 + a.shape[1] // 2],
    "flipped": lambda a: a.flip(0).flip(1)[: a.shape[0] // 2, : a.shape[1] // 2],
    "one row for all": lambda a: a[:1, : a.shape[1] // 2].expand(a.shape[0] // 2, -1),
    "one column for all": lambda a: a[: a.shape[0] // 2, :1].expand(-1, a.shape[1] // 2),
    "one element for all": lambda a: a[:1, :1].expand(a.shape[0] // 2, a.shape[1] // 2),
    "part of longer rows": lambda a: a[: a.shape[0] // 2, : a.shape[1] // 2],
    "contiguous, at an odd address": lambda a: a.flatten()[1 : 1 + a.numel() // 4].view(a.shape[0] // 2, -1),
}


def test_cases_12_and_24b_views(device, integers, assert_same_bits):
    for k, view in itertools.product((1, 33, 64), VIEWS):
        x, w = integers(-128, 128, 140, 2 * k, device=device), integers(-128, 128, 40, 2 * k, device=device)
        for x_view in (x[:70, :k], VIEWS[view](x)):
            for w_view in (w[:20, :k], VIEWS[view](w)):
                y = kernels.gemm_int8(x_view, w_view, out_dtype=torch.int32)
                assert_same_bits(y, exact(x_view, w_view, torch.int32))


def test_case_24b_odd_strides_of_dimensions_of_size_one(device, integers, assert_same_bits):
    storage = integers(-128, 128, 400, device=device)
    for m, n, k in ((1, 1, 1), (6, 5, 1), (1, 5, 9), (6, 1, 9)):
        x = storage.as_strided((m, k), (1 if m == 1 else k, 1 if k > 1 else 0))
        w = storage.as_strided((n, k), (3 if n == 1 else k, 1 if k > 1 else 7), 200)
        assert_same_bits(kernels.gemm_int8(x, w, out_dtype=torch.int32), exact(x, w, torch.int32))


def test_strided_scales_and_bias(device, normal, integers, assert_same_bits):
    x, w = integers(-128, 128, 6, 9, device=device), integers(-128, 128, 5, 9, device=device)
    scale_x, scale_w = normal(12, device=device)[::2], normal(1, device=device).expand(5)
    bias = normal(5, 2, device=device)[:, 1]
    reference = oracle(*(a.cpu().numpy() for a in (x, w, scale_x, scale_w, bias)))
    assert_same_bits(kernels.gemm_int8(x, w, scale_x, scale_w, bias), reference)


def test_case_9_a_nan_scale_poisons_its_row_alone(device, integers):
    x, w = integers(-128, 128, 6, 9, device=device), integers(-128, 128, 5, 9, device=device)
    scale_x = torch.ones(6, device=device)
    scale_x[2] = float("nan")
    for relu in (False, True):
        y = kernels.gemm_int8(x, w, scale_x, relu=relu)
        assert y.isnan().all(1).tolist() == [False, False, True, False, False, False]
        assert y.isnan().sum() == 5


def test_case_6_an_all_zero_channel(device, normal):
    weight = normal(4, 33, device=device)
    weight[2] = 0
    w, scale_w = kernels.quantize_rows(weight)
    x, scale_x = kernels.quantize_rows(normal(3, 33, device=device))
    y = kernels.gemm_int8(x, w, scale_x, scale_w)
    assert (y[:, 2] == 0).all()
    assert y.isfinite().all()


@pytest.mark.gpu
def test_cpu_and_gpu_give_the_same_bits(normal, assert_same_bits):
    for k in (1, 16, 783, 784, 4096):
        x, weight, bias = normal(100, k), normal(10, k) / 30, normal(10)
        results = []
        for device in ("cpu", "cuda"):
            q, scale_x = kernels.quantize_rows(x.to(device))
            w, scale_w = kernels.quantize_rows(weight.to(device))
            assert q.is_cuda == (device == "cuda")
            results.append(kernels.gemm_int8(q, w, scale_x, scale_w, bias.to(device), relu=k == 784))
        assert_same_bits(results[1], results[0])


@settings(max_examples=40, deadline=None, derandomize=True, database=None)
@given(m=st.integers(0, 20), n=st.integers(0, 20), k=st.integers(0, 40), seed=st.integers(0, 99))
def test_any_shape_on_the_cpu(m, n, k, seed):
    generator = np.random.default_rng(seed)
    x, w = (generator.integers(-128, 128, size, dtype=np.int8) for size in ((m, k), (n, k)))
    expected = np.einsum("mk,nk->mn", x.astype(np.int64), w.astype(np.int64))
    for accumulate in (_gemm_int8_cpu._int_mm, _gemm_int8_cpu._float_slices):
        assert np.array_equal(accumulate(torch.from_numpy(x), torch.from_numpy(w)).numpy(), expected)
    assert np.array_equal(kernels.gemm_int8(x, w, out_dtype=torch.int64), expected)


def test_refuses_what_does_not_fit(device):
    x = torch.zeros((4, 6), dtype=torch.int8, device=device)
    w = torch.zeros((5, 6), dtype=torch.int8, device=device)
    scale = torch.ones(5, device=device)
    with pytest.raises(TypeError, match=r"^x must be int8, uint8, got int16"):
        kernels.gemm_int8(x.to(torch.int16), w)
    with pytest.raises(TypeError, match=r"^w must be int8, got uint8"):
        kernels.gemm_int8(x, w.to(torch.uint8))
    with pytest.raises(TypeError, match=r"^w must be int8, got float32"):
        kernels.gemm_int8(x, w.float())
    with pytest.raises(ValueError, match=r"^w must have shape \(any, 6\), got \(5, 4\)"):
        kernels.gemm_int8(x, w[:, :4])
    with pytest.raises(TypeError, match=r"^scale_w must be float32, got float16"):
        kernels.gemm_int8(x, w, None, scale.half())
    with pytest.raises(TypeError, match=r"^scale_x must be an? .*got float"):
        kernels.gemm_int8(x, w, 0.5)
    with pytest.raises(ValueError, match=r"^scale_x must have shape \(4,\), got \(5,\)"):
        kernels.gemm_int8(x, w, scale)
    with pytest.raises(ValueError, match=r"^scale_w must have shape \(5,\), got \(5, 1\)"):
        kernels.gemm_int8(x, w, None, scale[:, None])
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(1,\)"):
        kernels.gemm_int8(x, w, bias=scale[:1])
    with pytest.raises(TypeError, match=r"^out_dtype must be one of .*torch\.uint8, got torch\.int16"):
        kernels.gemm_int8(x, w, out_dtype=torch.int16)
    one = scale[:1]
    for dtype, scale_y in ((torch.int8, None), (torch.uint8, None), (torch.float32, one), (torch.int32, one)):
        with pytest.raises(ValueError, match=r"^scale_y is needed for out_dtype int8 and uint8, and for no other"):
            kernels.gemm_int8(x, w, out_dtype=dtype, scale_y=scale_y)
    with pytest.raises(ValueError, match=r"^scale_y must have shape \(1,\), got \(5,\)"):
        kernels.gemm_int8(x, w, out_dtype=torch.int8, scale_y=scale)
    with pytest.raises(TypeError, match=r"^zero_x must be int32, got float32"):
        kernels.gemm_int8(x, w, zero_x=scale[:4])
    with pytest.raises(ValueError, match=r"^zero_x must have shape \(4,\), got \(5,\)"):
        kernels.gemm_int8(x, w, zero_x=scale.int())
    with pytest.raises(ValueError, match=r"^sums_w must have shape \(5,\), got \(4,\)"):
        kernels.gemm_int8(x, w, zero_x=scale[:1].int(), sums_w=scale[:4].int())
    with pytest.raises(ValueError, match=r"^bias has no meaning with out_dtype torch\.int32"):
        kernels.gemm_int8(x, w, bias=scale, out_dtype=torch.int32)
