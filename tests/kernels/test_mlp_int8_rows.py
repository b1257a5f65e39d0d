"""Whole int8 networks of many rows in one launch, on Hopper: the bits of one call after the other."""

from __future__ import annotations

import itertools

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _mlp_int8_rows_sm90 as sm90

NETWORKS = ((784, 256, 10), (64, 64, 10), (784, 256, 160, 80, 10), (784, 10), (1008, 208, 64))
NAN, INF = float("nan"), float("inf")


@pytest.fixture
def hopper():
    if kernels.mlp_int8.tier("cuda") != "sm90":
        pytest.skip("the kernel is for Hopper")
    return torch.device("cuda", 0)


def by_calls(x, layers):
    """The layers one after the other in float32; what is infinite between static ones is clipped."""
    for i, (w, scale_w, bias, scale_x) in enumerate(layers):
        if i and scale_x is not None:
            x = x.clamp(-torch.finfo(x.dtype).max, torch.finfo(x.dtype).max)
        q, scale = kernels.quantize_rows(x, scale_x)
        x = kernels.gemm_int8(q, w, scale, scale_w, bias, relu=i < len(layers) - 1)
    return x


@pytest.mark.gpu
@pytest.mark.parametrize("config", sm90.CONFIGS, ids=str)
def test_has_the_bits_of_one_call_after_the_other(hopper, config, normal, integers, assert_same_bits):
    fixed = torch.full((1,), 0.03, device=hopper)
    for sizes in NETWORKS:
        parts = []
        for k, n in itertools.pairwise(sizes):
            scale = (normal(n, device=hopper).abs() + 0.1) / (60 * k**0.5)
            parts.append((integers(-127, 128, n, k, device=hopper), scale, normal(n, device=hopper) / 4))
        x = normal(1000, sizes[0], device=hopper)
        x[3], x[5], x[7] = 0, x[5] * 1e-40, x[7] * 1e36
        x[11, 2], x[13, 3], x[17, 5] = NAN, INF, -INF
        for m, dtype, static in ((1000, torch.float32, ()), (1, torch.float16, ()), (333, torch.float16, (0, 1, 2, 3))):
            rows = x[:m].to(dtype)
            layers = [(*part, fixed if i in static else None) for i, part in enumerate(parts)]
            y = sm90.launch_mlp(rows, layers, config)
            assert_same_bits(y, by_calls(rows, layers))
        layers = [(w, scale[:1], None, fixed if i == 1 else None) for i, (w, scale, _) in enumerate(parts)]
        assert_same_bits(sm90.launch_mlp(x.bfloat16(), layers, config), by_calls(x.bfloat16(), layers))


@pytest.mark.parametrize("config", sm90.CONFIGS, ids=str)
def test_what_is_taken_fits(config):
    for sizes in NETWORKS:
        count = sm90.panels(sizes, config)
        assert count
        assert config.stages(count) >= 2
        assert config.shared(count) <= sm90.SHARED


def test_each_block_has_a_multiprocessor():
    batches = {64: False, 65: True, 1024: True, 1056: True, 1057: False}
    assert {m: sm90.choose((784, 256, 10), m, 132) is not None for m in batches} == batches


def test_what_is_not_taken_is_left_to_others():
    for sizes in (
        (784, 4096, 10),
        (2000, 256, 10),
        (784, 250, 10),
        (784, 256, 100),
        (783, 256, 10),
        (9,) * 6,
        (0, 16, 1),
    ):
        assert not any(sm90.panels(sizes, config) for config in sm90.CONFIGS), sizes
        assert sm90.choose(sizes, 1000, 132) is None
    with pytest.raises(ValueError, match="cannot share out"):
        sm90.Config(80, 2, 4, 48)
    with pytest.raises(ValueError, match="do not fit"):
        sm90.Config(160, 4, 1, 160)
