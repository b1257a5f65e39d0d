"""Whole int8 networks: the oracle's bits on every device, and on Hopper the same from one launch and from the chain."""

from __future__ import annotations

import itertools

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _mlp_int8_row_sm90 as row_sm90
from qsparse.kernels import _mlp_int8_sm90 as sm90
from qsparse.kernels._mlp_int8_slots import Slots
from qsparse.oracles.mlp_int8 import mlp_int8 as oracle

NAN, INF = float("nan"), float("inf")
MNIST = (784, 256, 10)
NETWORKS = [MNIST, (784, 320, 160, 80, 10), (784, 10), (100, 77, 33), (61, 130, 5, 3), (16, 1, 1), (33, 40, 70)]
BATCHES = (1, 3, 16, 17, 64, 200)


@pytest.fixture
def network(normal, integers):
    """``network(sizes, device, static=, bias=)``: (weights, their scales, biases) and input scales for the face."""

    def build(sizes, device="cpu", static=(), bias=True):
        weights, scales, biases, inputs = [], [], [], []
        for i, (k, n) in enumerate(itertools.pairwise(sizes)):
            weights.append(integers(-127, 128, n, k, device=device))
            scales.append((normal(n, device=device).abs() + 0.1) / (60 * k**0.5))
            biases.append(normal(n, device=device) / 4 if bias else None)
            inputs.append(torch.full((1,), 0.03, device=device) if i in static else None)
        return (weights, scales, biases), inputs

    return build


def on_cpu(values):
    return [None if value is None else value.cpu().numpy() for value in values]


def expected(x, arrays, input_scales=None):
    scales = None if input_scales is None else on_cpu(input_scales)
    return torch.from_numpy(oracle(x.float().cpu().numpy(), *map(on_cpu, arrays), input_scales=scales))


@pytest.mark.parametrize("sizes", NETWORKS, ids=str)
def test_has_the_oracle_s_bits(device, sizes, normal, network, assert_same_bits):
    arrays, _ = network(sizes, device)
    x = normal(max(BATCHES), sizes[0], device=device)
    y = expected(x, arrays)
    for m in BATCHES:
        out = kernels.mlp_int8(x[:m], *arrays)
        assert out.is_contiguous()
        assert_same_bits(out, y[:m])


@pytest.mark.parametrize("static", [(), (0,), (1,), (0, 1)])
def test_dtypes_static_scales_and_missing_biases(device, static, normal, network, assert_same_bits):
    for bias in (True, False):
        arrays, input_scales = network(MNIST, device, static, bias)
        for dtype in (torch.float32, torch.float16, torch.bfloat16):
            x = normal(20, 784, dtype=dtype, device=device)
            y = kernels.mlp_int8(x, *arrays, input_scales=input_scales)
            assert_same_bits(y, expected(x, arrays, input_scales))


def test_one_scale_for_all_weights(device, normal, network, assert_same_bits):
    (weights, _, biases), _ = network(MNIST, device)
    scales = [torch.full((1,), 0.002, device=device), torch.full((1,), 0.01, device=device)]
    x = normal(5, 784, device=device)
    assert_same_bits(kernels.mlp_int8(x, weights, scales, biases), expected(x, (weights, scales, biases)))


@pytest.mark.parametrize(("m", "static"), [(1, ()), (9, (0, 1)), (40, ()), (100, (0, 1)), (100, ())])
def test_case_9_special_rows(device, m, static, normal, network, assert_same_bits):
    """A row of zeros, and one with NaN or Inf, which gives NaN and touches no other."""
    arrays, input_scales = network(MNIST, device, static)
    x = normal(m, 784, device=device)
    for row, value in ((m - 1, 0), (m // 2, NAN), (m // 3, INF)):
        x[row, :: 1 if value == 0 else 500] = value
    y = kernels.mlp_int8(x, *arrays, input_scales=input_scales)
    lost = sorted({m // 2, m // 3})
    assert y.isnan().any(1).nonzero().flatten().tolist() == lost
    assert y[lost].isnan().all()
    assert_same_bits(y, expected(x, arrays, input_scales))


@pytest.mark.parametrize("static", [(), (1,), (0, 1), (1, 2), (2,)])
def test_what_overflows_in_between_is_lost_or_clipped(device, static, normal, network, assert_same_bits):
    (weights, scales, biases), input_scales = network((32, 40, 30, 3), device, static)
    biases[0][37] = INF
    x = normal(5, 32, device=device)
    x[3, 7] = NAN
    y = kernels.mlp_int8(x, weights, scales, biases, input_scales=input_scales)
    assert y[3].isnan().all()
    assert y.isnan().any(1).sum() == (1 if 1 in static else 5)
    assert_same_bits(y, expected(x, (weights, scales, biases), input_scales))


@pytest.mark.parametrize("sizes", [MNIST, (784, 320, 160, 80, 10), (48, 1040, 16, 3)], ids=str)
def test_chains_of_static_layers(device, sizes, normal, network, assert_same_bits):
    """The rows that are lost are known to the first launch and told by the last."""
    arrays, input_scales = network(sizes, device, range(len(sizes) - 1))
    x = normal(70, sizes[0], device=device)
    x[3, 1], x[5, 7], x[8] = NAN, INF, 0
    y = kernels.mlp_int8(x, *arrays, input_scales=input_scales, one_launch=False)
    assert y.isnan().all(1).nonzero().flatten().tolist() == [3, 5]
    assert_same_bits(y, expected(x, arrays, input_scales))
    for scale in (NAN, INF):  # no number as the first scale: all rows are lost
        no_number = [torch.full((1,), scale, device=device), *input_scales[1:]]
        y = kernels.mlp_int8(x, *arrays, input_scales=no_number, one_launch=False)
        assert y.isnan().all()
        assert_same_bits(y, expected(x, arrays, no_number))


def test_extreme_scales(device, normal, network, assert_same_bits):
    """Rows whose scales lie near the ends of float32's range, and values just beside ties."""
    arrays, _ = network(MNIST, device)
    x = normal(40, 784, device=device) * torch.logspace(-44, 38, 40, device=device)[:, None].clamp(1e-44, 8e37)
    x[3] = torch.arange(784, device=device) / 2 - 190
    assert_same_bits(kernels.mlp_int8(x, *arrays), expected(x, arrays))


def test_views_and_empty_batches(device, normal, network, assert_same_bits):
    arrays, _ = network((30, 20, 10), device)
    x = normal(70, 62, device=device)
    for view in (x[:, 1:31], x[::3, ::2][:, :30], x.t()[:, :30], x[:1, :30].expand(7, -1), x[:0, :30]):
        assert_same_bits(kernels.mlp_int8(view, *arrays), expected(view, arrays))
    (weights, scales, biases), _ = network((30, 40, 10), device)
    sliced = [weights[0][::2, 10:], weights[1][:, 20:]], [scales[0][::2], scales[1]], [biases[0][::2], biases[1]]
    assert_same_bits(kernels.mlp_int8(x[:, :20], *sliced), expected(x[:, :20], sliced))


def test_takes_numpy(network, normal):
    arrays, input_scales = network((30, 20, 10), static=(1,))
    x = normal(4, 30)
    y = kernels.mlp_int8(x.numpy(), *map(on_cpu, arrays), input_scales=on_cpu(input_scales))
    assert torch.equal(torch.from_numpy(y), kernels.mlp_int8(x, *arrays, input_scales=input_scales))


def test_refuses_what_does_not_fit(device, network, normal):
    (weights, scales, biases), _ = network((6, 5, 4), device)
    x = normal(3, 6, device=device)
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got int8"):
        kernels.mlp_int8(x.to(torch.int8), weights, scales, biases)
    with pytest.raises(ValueError, match=r"^weights\[0\] must have shape \(any, 7\), got \(5, 6\)"):
        kernels.mlp_int8(normal(3, 7, device=device), weights, scales, biases)
    with pytest.raises(ValueError, match=r"^weights\[1\] must have shape \(any, 5\), got \(5, 6\)"):
        kernels.mlp_int8(x, weights[:1] * 2, scales[:1] * 2, biases[:1] * 2)
    with pytest.raises(ValueError, match=r"^biases must have one entry for each of the 2 layers, got 1"):
        kernels.mlp_int8(x, weights, scales, biases[:1])
    arguments = {"weights": weights, "weight_scales": scales, "biases": biases, "input_scales": None}
    for name in arguments:
        with pytest.raises(TypeError, match=rf"^{name} must be a list or a tuple with one entry a layer, got float"):
            kernels.mlp_int8(x, **{**arguments, name: 0.5})
    with pytest.raises(ValueError, match=r"^weights must hold at least one layer"):
        kernels.mlp_int8(x, [], [], [])
    with pytest.raises(TypeError, match=r"^weight_scales\[1\] must be an? .*got float"):
        kernels.mlp_int8(x, weights, [scales[0], 0.5], biases)
    with pytest.raises(ValueError, match=r"^input_scales\[0\] must have shape \(1,\), got \(5,\)"):
        kernels.mlp_int8(x, weights, scales, biases, input_scales=[scales[0], None])
    with pytest.raises(ValueError, match=r"^one_launch is not possible for 6-5-4 at 0 rows"):
        kernels.mlp_int8(x[:0], weights, scales, biases, one_launch=True)


# --- one launch -----------------------------------------------------------------------------------------------------

GROUPS = (1, 2, 8, 16, 24, 128)


def plans(sizes, m):
    """Every plan that fits: all configurations, shared out by small and large groups, few and many rows in each."""
    for config, group, rows in itertools.product(sm90.CONFIGS, GROUPS, (None, min(5, m))):
        p = sm90.plan(sizes, m, config, group, rows)
        if p and p.groups <= 8 and p.group * p.groups <= 132:
            yield sm90.launch_mlp, p
    for config in row_sm90.CONFIGS:
        p = row_sm90.plan(sizes, m, config)
        if p and (config.group or p.blocks <= 132):
            yield row_sm90.launch_mlp, p


@pytest.fixture
def hopper():
    if kernels.mlp_int8.tier("cuda") != "sm90":
        pytest.skip("the kernel is for Hopper")
    return torch.device("cuda", 0)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [*NETWORKS, (784, 1024, 1024, 10), (784, 4096, 4096, 10)], ids=str)
@pytest.mark.parametrize("m", [1, 17, 64])
def test_every_plan_has_the_chain_s_bits(hopper, sizes, m, normal, network):
    arrays, input_scales = network(sizes, hopper, static=(1,))
    x = normal(m, sizes[0], dtype=torch.float16, device=hopper)
    for scales in (input_scales, None):
        chain = kernels.mlp_int8(x, *arrays, input_scales=scales, one_launch=False)
        layers = list(zip(*arrays, scales or [None] * len(input_scales), strict=True))
        for launch_mlp, p in plans(sizes, m):
            y = launch_mlp(x, layers, p)
            torch.cuda.synchronize()
            assert torch.equal(y, chain), str(p)


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [MNIST, (784, 1024, 1024, 10), (784, 4096, 4096, 10)], ids=str)
def test_what_is_chosen_has_the_chain_s_bits(hopper, sizes, normal, network, assert_same_bits):
    arrays, _ = network(sizes, hopper)
    for dtype in (torch.float16, torch.float32):
        x = normal(1024, sizes[0], dtype=dtype, device=hopper)
        for m in (1, 2, 16, 64, 1000, 1024):
            assert_same_bits(kernels.mlp_int8(x[:m], *arrays), kernels.mlp_int8(x[:m], *arrays, one_launch=False))


@pytest.mark.gpu
@pytest.mark.parametrize("sizes", [MNIST, (784, 1024, 1024, 10)], ids=str)
def test_replays_of_a_graph(hopper, sizes, normal, network, assert_same_bits):
    """Again and again, with new inputs, and two graphs that may use counters side by side."""
    arrays, _ = network(sizes, hopper)
    x = normal(1, sizes[0], dtype=torch.float16, device=hopper)
    kernels.mlp_int8(x, *arrays)
    graphs, outputs = [], []
    for _ in range(2):
        graphs.append(torch.cuda.CUDAGraph())
        with torch.cuda.graph(graphs[-1]):
            outputs.append(kernels.mlp_int8(x, *arrays))
    streams = [torch.cuda.Stream() for _ in graphs]
    for _ in range(20):
        x.copy_(normal(1, sizes[0], dtype=torch.float16))
        torch.cuda.synchronize()
        for graph, stream in zip(graphs, streams, strict=True):
            with torch.cuda.stream(stream):
                graph.replay()
        torch.cuda.synchronize()
        chain = kernels.mlp_int8(x, *arrays, one_launch=False)
        for y in outputs:
            assert_same_bits(y, chain)


# --- plans, without a GPU -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("sizes", [*NETWORKS, (784, 4096, 4096, 10)], ids=str)
def test_plans_fit(sizes):
    count = 0
    for m in (1, 5, 64, 1000, 10_000):
        for config, group in itertools.product(sm90.CONFIGS, GROUPS):
            p = sm90.plan(sizes, m, config, group)
            if p is None:
                continue
            count += 1
            assert p.shared <= sm90.SHARED
            assert p.groups * p.rows >= m > (p.groups - 1) * p.rows
            offsets = [*p.scales_at, *p.sent_at, p.act_at, p.lines_at[-1], *p.lines_at[:-1]]
            assert offsets == sorted(offsets)
            assert p.act_at % 128 == 0
            assert all(at % 64 == 0 for at in (*p.lines_at, *p.sent_at))
            assert all(at % 256 == 0 for at in (*p.outputs_at, *p.inputs_at))
            for width, n in zip(p.slices[:-1], sizes[1:], strict=False):
                assert width % 8 == 0
                assert width * group >= n
    assert count


def test_what_is_too_large_has_no_plan():
    assert not any(
        sm90.plan(sizes, m, config, 8)
        for config in sm90.CONFIGS
        for sizes, m in (((784, 10), 0), ((0, 10), 1), ((784, 5000, 10), 1), ((9,) * 6, 1), ((784, 4096, 4096, 10), 1))
    )
    assert sm90.choose((784, 4096, 4096, 10), 10_000, 132) is None
    assert sm90.choose(MNIST, 1, 132).group == 8
    for wrong in ((784, 10), (780, 256, 10), (784, 250, 10), (784, 256, 17), (784, 1040, 10), (0, 16, 10)):
        assert row_sm90.choose(wrong, 1, 132) is None
    assert row_sm90.choose(MNIST, 65, 132) is None
    assert row_sm90.choose((784, 4096, 4096, 10), 1, 120) is None


@pytest.mark.parametrize(
    ("sizes", "m", "group", "blocks"),
    [
        (MNIST, 1, 16, 16),
        (MNIST, 16, 16, 256),
        (MNIST, 64, 8, 512),
        ((784, 512, 10), 3, 16, 48),
        ((784, 1024, 1024, 10), 1, 16, 16),
        ((784, 4096, 4096, 10), 1, 0, 128),
        ((1040, 16, 16, 1), 1, 0, 1),
    ],
)
def test_a_row_is_a_cluster_s_or_all_blocks(sizes, m, group, blocks):
    p = row_sm90.choose(sizes, m, 132)
    assert (p.config.group, p.blocks) == (group, blocks)
    assert p.shared <= row_sm90.SHARED
    assert max(sizes[1:-1]) <= p.config.slice * (group or blocks)


def test_slots_of_streams_and_captures_are_their_own():
    memory = Slots(torch.device("cpu"), 512, 128)
    slots = [memory.slot(*use) for use in ((5, False), (6, False), (5, True), (5, True), (5, False))]
    assert len(set(slots)) == 4
    assert slots[4] == slots[0]
    for _ in range(512 - 4):
        assert memory.slot(5, True) not in (None, *slots)
    assert memory.slot(5, True) is None
    assert memory.slot(5, False) == slots[0]
