"""Whole int8 networks of batches that fill the card, in one launch on Hopper: the bits of one call after the other."""

from __future__ import annotations

import itertools

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _mlp_int8_tall_sm90 as sm90

NETWORKS = ((784, 256, 10), (64, 64, 10), (784, 256, 160, 80, 10), (16, 16, 1), (1008, 208, 64), (1024, 256, 256, 33))
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


@pytest.mark.gpu
def test_what_is_chosen_has_the_bits_of_one_call_after_the_other(hopper, normal, integers, assert_same_bits):
    fixed = torch.full((1,), 0.03, device=hopper)
    parts = [
        (integers(-127, 128, n, k, device=hopper), normal(n, device=hopper).abs() / 3000, normal(n, device=hopper))
        for k, n in ((784, 256), (256, 10))
    ]
    weights, scales, biases = zip(*parts, strict=True)
    x = normal(10_000, 784, dtype=torch.float16, device=hopper)
    for m, scale_x in ((65, None), (1024, None), (2000, None), (3000, None), (10_000, None), (10_000, fixed)):
        y = kernels.mlp_int8(x[:m], weights, scales, biases, input_scales=[scale_x] * 2)
        assert_same_bits(y, by_calls(x[:m], [(*part, scale_x) for part in parts]))


@pytest.mark.gpu
@pytest.mark.parametrize("static", [False, True])
def test_replays_of_a_graph(hopper, static, normal, integers, assert_same_bits):
    """Again and again, with new inputs: no launch leaves anything behind that the next one finds."""
    fixed = torch.full((1,), 0.03, device=hopper) if static else None
    layers = [
        (
            integers(-127, 128, n, k, device=hopper),
            normal(n, device=hopper).abs() / 3000,
            normal(n, device=hopper),
            fixed,
        )
        for k, n in ((784, 256), (256, 10))
    ]
    x = normal(10_000, 784, dtype=torch.float16, device=hopper)
    sm90.launch_mlp(x, layers)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        y = sm90.launch_mlp(x, layers)
    for _ in range(10):
        x.copy_(normal(10_000, 784, device=hopper))
        y.fill_(NAN)
        graph.replay()
        assert_same_bits(y, by_calls(x, layers))


@pytest.mark.parametrize("config", sm90.CONFIGS, ids=str)
def test_what_is_taken_fits(config):
    for sizes in NETWORKS:
        count = sm90.panels(sizes)
        assert count
        assert config.stages(count) >= 3  # a stage is filled again when the panel after the next one is waited for
        assert config.shared(count) <= sm90.SHARED


def test_rows_are_shared_out_evenly():
    batches = {64: None, 1056: None, 1057: 16, 2112: 16, 2113: 80, 10_000: 80, 10_560: 80, 10_561: None}
    for m, rows in batches.items():
        assert sm90.choose((784, 256, 10), m, 132) == (sm90.Config(rows) if rows else None), m


def test_what_is_not_taken_is_left_to_others():
    for sizes in (
        (784, 10),
        (784, 4096, 10),
        (784, 272, 10),
        (2000, 256, 10),
        (784, 250, 10),
        (784, 256, 100),
        (783, 256, 10),
        (16,) * 6,
        (0, 16, 1),
    ):
        assert sm90.panels(sizes) is None, sizes
        assert sm90.choose(sizes, 2000, 132) is None
    for rows in (0, 40, 96):
        with pytest.raises(ValueError, match="multiple of 16 rows up to 80"):
            sm90.Config(rows)
