"""int8 layers of float activations: the oracle's bits on every device, and of one launch the same."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.oracles.linear_int8 import linear_int8 as oracle

NAN, INF = float("nan"), float("inf")
FLOATS = (torch.float32, torch.float16, torch.bfloat16)


@pytest.fixture
def weights(normal, integers):
    """``weights(n, k, device)``: int8 weights, their scales and a bias."""

    def build(n, k, device="cpu"):
        return (
            integers(-127, 128, n, k, device=device),
            (normal(n, device=device).abs() + 0.1) / 100,
            normal(n, device=device),
        )

    return build


def expected(x, w, scale_w, bias=None, *, out_dtype=torch.float32, scale_x=None, relu=False):
    arrays = [None if a is None else a.float().cpu().numpy() for a in (x, w, scale_w, bias, scale_x)]
    y = oracle(*arrays[:4], scale_x=arrays[4], relu=relu)
    return torch.from_numpy(y).to(out_dtype)


@pytest.mark.parametrize("shape", [(1, 10, 784), (70, 66, 40), (33, 256, 784), (5, 3, 1), (0, 16, 32), (40, 0, 16)])
def test_has_the_oracle_s_bits(device, shape, normal, weights, assert_same_bits):
    m, n, k = shape
    w, scale_w, bias = weights(n, k, device)
    x = normal(m, k, device=device)
    fixed = torch.full((1,), 0.02, device=device)
    for out_dtype in FLOATS:
        for options in ({}, {"relu": True}, {"relu": True, "scale_x": fixed}):
            y = kernels.linear_int8(x, w, scale_w, bias, out_dtype=out_dtype, **options)
            assert_same_bits(y, expected(x, w, scale_w, bias, out_dtype=out_dtype, **options))
        one = torch.full((1,), 0.01, device=device)
        y = kernels.linear_int8(x.to(out_dtype), w, one, out_dtype=out_dtype)
        assert_same_bits(y, expected(x.to(out_dtype), w, one.expand(n), out_dtype=out_dtype))


def test_case_9_special_rows(device, normal, weights, assert_same_bits):
    """Rows of zeros, of the smallest and largest numbers, and with NaN or Inf, which give NaN and touch no other."""
    w, scale_w, bias = weights(32, 64, device)
    x = normal(100, 64, device=device)
    x[3], x[5], x[7] = 0, x[5] * 1e-40, x[7] * 1e37
    x[11, 2], x[13, 3], x[17, 5] = NAN, INF, -INF
    for scale_x in (None, torch.full((1,), 0.02, device=device)):
        y = kernels.linear_int8(x, w, scale_w, bias, scale_x=scale_x)
        assert y.isnan().any(1).nonzero()[:, 0].tolist() == [11, 13, 17]
        assert_same_bits(y, expected(x, w, scale_w, bias, scale_x=scale_x))


def test_views(device, normal, weights, assert_same_bits):
    w, scale_w, bias = weights(96, 160, device)
    x = normal(50, 200, device=device)
    for view in (x[:, 8:72], x[::2, 40:104], x.t()[:64, :64], x[:1, :64].expand(7, -1)):
        parts = view[:, : w[::2, 16:80].shape[1]], w[::2, 16:80], scale_w[::2], bias[::2]
        if view.shape[1] < 64:
            parts = view, w[::2, : view.shape[1]], *parts[2:]
        assert_same_bits(kernels.linear_int8(*parts), expected(*parts))


def test_sums_beyond_int32(device, assert_same_bits):
    """All of x and w at their largest, where sums of 127 * 127 just fit 32 bits, and where they do not."""
    for k in (133_144, 133_145, 140_000):
        x, w = torch.full((3, k), 12.7, device=device), torch.full((5, k), 127, dtype=torch.int8, device=device)
        scale = torch.full((5,), 0.5, device=device)
        q, scale_x = kernels.quantize_rows(x)
        assert (q == 127).all()
        expected = np.float32(127 * 127 * k) * scale_x.cpu().numpy()[:, None] * np.float32(0.5)
        assert_same_bits(kernels.linear_int8(x, w, scale), np.broadcast_to(expected, (3, 5)).copy())


def test_refuses_what_does_not_fit(device, normal, weights):
    w, scale_w, bias = weights(4, 6, device)
    x = normal(3, 6, device=device)
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got int8"):
        kernels.linear_int8(x.to(torch.int8), w, scale_w)
    with pytest.raises(ValueError, match=r"^w must have shape \(any, 7\), got \(4, 6\)"):
        kernels.linear_int8(normal(3, 7, device=device), w, scale_w)
    with pytest.raises(ValueError, match=r"^scale_w must have shape \(4,\), got \(3,\)"):
        kernels.linear_int8(x, w, scale_w[:3])
    with pytest.raises(ValueError, match=r"^scale_x must have shape \(1,\), got \(4,\)"):
        kernels.linear_int8(x, w, scale_w, bias, scale_x=scale_w)
    with pytest.raises(TypeError, match=r"^out_dtype must be one of .*, got torch.int8"):
        kernels.linear_int8(x, w, scale_w, out_dtype=torch.int8)
    with pytest.raises(ValueError, match=r"^one_launch is not possible for 3 rows of 6 and 4 outputs"):
        kernels.linear_int8(x, w, scale_w, one_launch=True)


# --- one launch -----------------------------------------------------------------------------------------------------


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", FLOATS)
def test_one_launch_has_the_bits_of_two_calls(dtype, normal, weights, assert_same_bits):
    device = torch.device("cuda", 0)
    if kernels.linear_int8.tier(device) == "simt":
        pytest.skip("the kernel needs compute capability 8.0")
    fixed = torch.full((1,), 0.02, device=device)
    for m, n, k in ((1, 1, 16), (7, 10, 784), (100, 16, 1024), (333, 10, 4096), (50, 3, 1040), (9, 10, 2000)):
        w, scale_w, bias = weights(n, k, device)
        x = normal(m, k, dtype=dtype, device=device)
        x[m // 2] = 0
        x[m // 3, k // 3] = NAN
        for options in (
            {},
            {"relu": True, "scale_x": fixed, "out_dtype": torch.float16},
            {"out_dtype": torch.bfloat16},
        ):
            two = kernels.linear_int8(x, w, scale_w, bias, one_launch=False, **options)
            assert_same_bits(kernels.linear_int8(x, w, scale_w, bias, one_launch=True, **options), two)
            two = kernels.linear_int8(x, w, scale_w[:1], one_launch=False, **options)
            assert_same_bits(kernels.linear_int8(x, w, scale_w[:1], one_launch=True, **options), two)
