"""The int8 product with 2:4 weights: the bits of the dense product of the expanded weights, in every tier."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.oracles.gemm_int8_24 import gemm_int8_24 as oracle
from qsparse.sparse import compress_24

SHAPES = [(1, 10, 784), (17, 64, 64), (64, 256, 784), (130, 200, 1024), (300, 129, 2056), (257, 520, 129), (5, 7, 3)]


TIERS = ("simt", "sm80", "sm90")  # worst first


@pytest.fixture(params=["cpu", *(pytest.param(tier, marks=pytest.mark.gpu) for tier in TIERS)])
def device(request, monkeypatch) -> torch.device:
    """The CPU, and the GPU once a tier: the best that may be taken; what it does not take goes to a lower one."""
    if request.param == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    best = kernels.gemm_int8_24.tier(device)
    if TIERS.index(request.param) > TIERS.index(best):
        pytest.skip(f"this GPU's best tier is {best}")
    monkeypatch.setattr(kernels.gemm_int8_24, "tier", lambda device: request.param)
    return device


def two_of_four(n, k, integers):
    """A random int8 (N, K) matrix of which every four neighbouring columns keep two at most, dense and compressed."""
    generator = torch.Generator().manual_seed(n + k)
    rank = torch.rand((n, -(-k // 4), 4), generator=generator).argsort(dim=2)
    w = integers(-127, 128, n, k) * (rank < 2).reshape(n, -(-k // 4) * 4)[:, :k]
    return w, *compress_24(w)


def by_oracle(*arrays, **options):
    arrays, options = (
        [None if a is None else a.cpu().numpy() for a in arrays],
        {name: value.cpu().numpy() if isinstance(value, torch.Tensor) else value for name, value in options.items()},
    )
    return oracle(*arrays, **options)


@pytest.mark.parametrize("shape", SHAPES)
def test_the_bits_of_the_oracle(device, normal, integers, shape, assert_same_bits):
    m, n, k = shape
    _, values, metadata = (a.to(device) for a in two_of_four(n, k, integers))
    x = integers(-128, 128, m, k, device=device)
    scale_x, scale_w, bias = (normal(size, device=device) for size in (m, n, n))
    bare = torch.from_numpy(by_oracle(x, values, metadata, bare=True))
    for dtype in (torch.int32, torch.int64):
        assert_same_bits(kernels.gemm_int8_24(x, values, metadata, out_dtype=dtype), bare.to(dtype))
    for relu in (False, True):
        for given in ((), (scale_x,), (scale_x, scale_w, bias), (scale_x[:1], scale_w[:1]), (None, None, bias)):
            y = torch.from_numpy(by_oracle(x, values, metadata, *given, relu=relu))
            for dtype in (torch.float32, torch.float16, torch.bfloat16):
                ours = kernels.gemm_int8_24(x, values, metadata, *given, relu=relu, out_dtype=dtype)
                assert_same_bits(ours, y.to(dtype))


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
def test_every_option_of_the_dense_product(device, normal, integers, shape, dtype, assert_same_bits):
    m, n, k = shape
    w, values, metadata = (a.to(device) for a in two_of_four(n, k, integers))
    low = -128 if dtype == torch.int8 else 0
    x = integers(low, low + 256, m, k, dtype=dtype, device=device)
    zero = integers(low, low + 256, m, dtype=torch.int32, device=device)
    scaling = [normal(size, device=device) for size in (m, n, n)]
    step = torch.full((1,), 40.0, device=device)
    for corrected in ({}, {"zero_x": zero}, {"zero_x": zero[:1], "sums_w": w.sum(1, dtype=torch.int32)}):
        for out in (torch.float32, torch.float16, torch.bfloat16, torch.int8, torch.uint8):
            options = {"relu": out == torch.uint8, "out_dtype": out, **corrected}
            options |= {"scale_y": step} if out.itemsize == 1 else {}
            ours = kernels.gemm_int8_24(x, values, metadata, *scaling, **options)
            assert_same_bits(ours, kernels.gemm_int8(x, w, *scaling, **options))
        bare = kernels.gemm_int8_24(x, values, metadata, out_dtype=torch.int32, **corrected)
        assert_same_bits(bare, kernels.gemm_int8(x, w, out_dtype=torch.int32, **corrected))


@pytest.mark.parametrize("shape", [(0, 5, 16), (5, 0, 16), (3, 4, 0), (0, 0, 0), (1, 1, 1), (9, 7, 33)])
def test_empty_and_odd_shapes(device, normal, integers, shape, assert_same_bits):
    m, n, k = shape
    _, values, metadata = (a.to(device) for a in two_of_four(n, k, integers))
    x, bias = integers(-128, 128, m, k, device=device), normal(n, device=device)
    expected = torch.from_numpy(by_oracle(x, values, metadata, bias=bias).astype(np.float32))
    assert_same_bits(kernels.gemm_int8_24(x, values, metadata, bias=bias), expected)


def test_case_4_the_largest_values_do_not_wrap(device, assert_same_bits):
    for k in (2048, 131_071, 140_000):
        x = torch.full((9, k), -128, dtype=torch.int8, device=device)
        width = -(-k // 8) * 8
        values = torch.full((10, width // 2), -128, dtype=torch.int8, device=device)
        values[:, k // 2 :] = 0
        metadata = torch.full((10, width // 8), 0b0100_0100, dtype=torch.uint8, device=device)
        bare = kernels.gemm_int8_24(x, values, metadata, out_dtype=torch.int64)
        assert_same_bits(bare, torch.full((9, 10), k // 2 * 2**14))


def test_refuses_what_does_not_fit(device, integers):
    _, values, metadata = (a.to(device) for a in two_of_four(6, 24, integers))
    x = integers(-128, 128, 4, 24, device=device)
    with pytest.raises(TypeError, match="x must be int8, uint8, got float32"):
        kernels.gemm_int8_24(x.float(), values, metadata)
    with pytest.raises(TypeError, match="values must be int8, got uint8"):
        kernels.gemm_int8_24(x, values.view(torch.uint8), metadata)
    with pytest.raises(ValueError, match=r"values must have shape \(any, 12\), got \(6, 11\)"):
        kernels.gemm_int8_24(x, values[:, :11], metadata)
    with pytest.raises(ValueError, match=r"metadata must have shape \(6, 3\), got \(6, 2\)"):
        kernels.gemm_int8_24(x, values, metadata[:, :2])
    with pytest.raises(ValueError, match=r"scale_w must have shape \(6,\), got \(5,\)"):
        kernels.gemm_int8_24(x, values, metadata, None, torch.ones(5, device=device))
    with pytest.raises(ValueError, match=r"scale_y is needed for out_dtype int8 and uint8, and for no other"):
        kernels.gemm_int8_24(x, values, metadata, out_dtype=torch.int8)
    with pytest.raises(ValueError, match="tier 'sm70' is not possible"):
        kernels.gemm_int8_24(x, values, metadata, tier="sm70")


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")  # Inductor's own, while it starts
def test_compiled(device, normal, integers):
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    _, values, metadata = (a.to(device) for a in two_of_four(16, 32, integers))
    x, scale = integers(-128, 128, 16, 32, device=device), normal(16, device=device)
    compiled = torch.compile(
        lambda x: kernels.gemm_int8_24(x, values, metadata, scale, relu=True), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), kernels.gemm_int8_24(x, values, metadata, scale, relu=True))
