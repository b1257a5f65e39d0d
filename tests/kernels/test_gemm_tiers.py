"""What ``gemm`` does beyond ``y = act(x @ w.T + bias)``, and the same product on every tier that the card has."""

from __future__ import annotations

import importlib
import warnings

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import (
    _face,
    _gemm_int8_sm90,
    _gemm_single_sm90,
    _gemm_sm90,
    _gemm_sm90_configs,
    _load,
    _relu_mask,
)
from qsparse.kernels._gemm_int8_epilogue import Epilogue
from qsparse.oracles.gemm import gemm as oracle

GEMM = importlib.import_module("qsparse.kernels.gemm")  # the package's attribute of that name is the function
HALVES = (torch.float16, torch.bfloat16)
# Below a tile, tiles with tails in every direction, several tiles and clusters, long K, a head of 10 classes.
SHAPES = [
    (1, 8, 8),
    (64, 64, 64),
    (72, 136, 200),
    (300, 520, 784),
    (1000, 10, 256),
    (16, 4096, 1024),
    (520, 1032, 2056),
]


def of_tier(tier: str, device: torch.device) -> str:
    """The tier, if this device has it; skips otherwise."""
    order = ("simt", "sm80", "sm90")
    best = kernels.gemm.tier(device)
    if order.index(tier) > order.index(best):
        pytest.skip(f"this GPU's best tier is {best}")
    return tier


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("tier", ["simt", "sm80", "sm90"])
def test_every_tier_and_layout(tier, dtype, layout, normal, to_numpy, assert_close):
    device = torch.device("cuda", 0)
    of_tier(tier, device)
    for m, n, k in SHAPES:
        if ("t" in layout[0] and m % 8) or ("n" in layout[1] and n % 8):
            continue  # rows off 16-byte boundaries: only simt reads them
        x, w = normal(m, k, dtype=dtype, device=device), normal(n, k, dtype=dtype, device=device)
        bias = normal(n, dtype=dtype, device=device)
        x_given = x if layout[0] == "n" else x.t().contiguous().t()
        w_given = w if layout[1] == "t" else w.t().contiguous().t()
        y = kernels.gemm(x_given, w_given, bias, relu=True, tier=tier)
        assert_close(y, oracle(*to_numpy((x, w, bias)), relu=True))


@pytest.mark.gpu
@pytest.mark.parametrize("layout", ["nt", "nn", "tn", "tt"])
@pytest.mark.parametrize("dtype", HALVES)
def test_products_off_16_byte_boundaries_are_copied_for_the_tensor_cores(dtype, layout, normal, assert_close):
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    for m, n, k in [(300, 700, 1500), (5, 11, 129), (4099, 2047, 9)]:
        x, w = normal(m, k, dtype=dtype, device=device), normal(n, k, dtype=dtype, device=device)
        bias, expected = normal(n, dtype=dtype, device=device), x.double() @ w.double().t()
        x_given = x if layout[0] == "n" else x.t().contiguous().t()
        w_given = w if layout[1] == "t" else w.t().contiguous().t()
        for x_placed in (x_given, torch.nn.functional.pad(x_given, (1, 0))[:, 1:]):
            with _load.launched() as launches:
                y = kernels.gemm(x_placed, w_given, bias, relu=True)
            assert launches[0].startswith(("gemm_sm90", "gemm_single_sm90"))
            assert_close(y, (expected + bias.double()).relu().cpu().numpy())
        assert_close(
            kernels.gemm(x_given, w_given, bias, relu=True, tier="simt"), (expected + bias).relu().cpu().numpy()
        )


@pytest.mark.parametrize("dtype", [torch.float16, torch.float8_e4m3fn, torch.float32])
def test_rows_are_put_on_16_byte_boundaries(dtype, normal):
    a = normal(6, 40)
    for given in (a[:5, :7], a[:5, :7].t(), a[:, 1:33], a[:, :32], a[:, :32].t(), a[:, :0], a[:0]):
        given = given.to(dtype, memory_format=torch.preserve_format)
        matrix, k_major, ld = _face.matrix(given)
        placed, stride = _gemm_sm90.on_boundaries(matrix, k_major, ld)
        assert placed.data_ptr() % 16 == stride * placed.element_size() % 16 == 0
        assert stride == (placed.stride(0) if k_major else placed.stride(1)) or 0 in placed.shape
        assert torch.equal(placed.float(), given.float())


@pytest.mark.gpu
@pytest.mark.parametrize("config", [*_gemm_sm90.CONFIGS, *_gemm_single_sm90.CONFIGS], ids=str)
@pytest.mark.parametrize("x_k", [True, False])
@pytest.mark.parametrize("w_k", [True, False])
def test_every_configuration_of_sm90(config, x_k, w_k, normal, to_numpy, assert_close):
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    if not config.reads(x_k, w_k):
        pytest.skip("this cluster cannot divide loads of that layout")
    for m, n, k in [(72, 136, 200), (1032, 776, 1416), (8, 8, 2048), (3000, 264, 64)]:
        if not config.suits(m, n, k):
            continue
        x, w = normal(m, k, dtype=torch.float16, device=device), normal(n, k, dtype=torch.float16, device=device)
        bias = normal(n, dtype=torch.float16, device=device)
        x_given, w_given = x if x_k else x.t().contiguous().t(), w if w_k else w.t().contiguous().t()
        y = _gemm_sm90.run(config, x_given, w_given, bias, True)
        assert_close(y, oracle(*to_numpy((x, w, bias)), relu=True))


@pytest.mark.gpu
@pytest.mark.parametrize("config", _gemm_sm90.CONFIGS, ids=str)
@pytest.mark.parametrize("n", [264, 262])
def test_blocks_that_take_several_tiles(config, n, normal, to_numpy, assert_close):
    """More tiles than multiprocessors, of few steps of K and of many, for the copy engine to store or not."""
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    for m, k in [(40_000, 8), (40_000, 72), (20_000, 784)]:
        x, w = (normal(rows, k, dtype=torch.float16, device=device) for rows in (m, n))
        bias = normal(n, dtype=torch.float16, device=device)
        y = _gemm_sm90.run(config, x, w, bias, True)
        assert_close(y, to_numpy((x.double() @ w.double().t() + bias.double()).relu()))


@pytest.mark.gpu
@pytest.mark.parametrize("out", [torch.int32, torch.float32, torch.bfloat16, torch.int8])
def test_the_pipeline_of_8_bit_products_in_every_configuration(out, integers):
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    scale = None if out == torch.int32 else torch.full((1,), 2.0**-12, device=device)  # exact
    one = torch.ones(1, device=device) if out == torch.int8 else None
    for config in _gemm_int8_sm90.configs(torch.int8, out):
        for m, n, k in [(300, 272, 2048), (20_000, 272, 80), (12_000, 528, 784)]:
            x, w = (integers(-127, 128, rows, k, device=device) for rows in (m, n))
            y = torch.empty((m, n), dtype=out, device=device)
            _gemm_int8_sm90.launch_gemm(x, k, w, k, y, Epilogue(scale_x=scale, scale_y=one), config)
            expected = x.double() @ w.double().t() * (1 if scale is None else scale)
            expected = expected.round().clamp(-127, 127) if out == torch.int8 else expected
            assert torch.equal(y, expected.to(out)), config


@pytest.mark.gpu
@pytest.mark.parametrize("config", _gemm_single_sm90.CONFIGS, ids=str)
def test_single_tiles_write_any_columns_anywhere_and_accumulate(config, normal, to_numpy, assert_close):
    """Outputs of odd widths and at odd places, between sentinels; nothing outside them is touched."""
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    for dtype, (m, n, k), offset in (
        (torch.float16, (300, 70, 784), 0),
        (torch.bfloat16, (70, 129, 520), 1),
        (torch.float16, (129, 256, 1032), 2),
        (torch.bfloat16, (1, 9, 1024), 3),
    ):
        x, w = normal(m, k, dtype=dtype, device=device), normal(n, k, dtype=dtype, device=device)
        memory = torch.full((offset + m * n + 64,), 77.0, dtype=dtype, device=device)
        y = memory[offset : offset + m * n].view(m, n).fill_(torch.nan)
        operands = (x, True, k, w, True, k, None)
        _gemm_sm90.launch_gemm(*operands, y, alpha=0.5, config=config)
        assert_close(y, oracle(0.5 * to_numpy(x), to_numpy(w)))
        before = y.clone()
        _gemm_sm90.launch_gemm(*operands, y, alpha=0.5, accumulate=True, config=config)
        torch.testing.assert_close(y, before + before, rtol=0, atol=0)
        assert bool((memory[:offset] == 77).all() and (memory[offset + m * n :] == 77).all())


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(5, 7, 9), (72, 136, 200), (130, 10, 64), (0, 4, 8), (4, 0, 8), (3, 5, 0)])
def test_alpha_output_dtype_and_accumulate(device, dtype, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    x, w, bias = (normal(*size, dtype=dtype, device=device) for size in ((m, k), (n, k), (n,)))
    numpy = to_numpy((x, w, bias))
    scaled = oracle(0.37 * numpy[0], numpy[1], numpy[2], relu=True)
    assert_close(kernels.gemm(x, w, bias, relu=True, alpha=0.37), scaled)
    wide = kernels.gemm(x, w, bias, relu=True, alpha=0.37, out_dtype=torch.float32)
    assert wide.dtype == torch.float32
    assert_close(wide, scaled)

    out = torch.full((m, n), 7.0, dtype=dtype, device=device)
    assert kernels.gemm(x, w, out=out) is out
    assert_close(out, oracle(*numpy[:2]))
    before = normal(m, n, dtype=torch.float32, device=device)
    total = before.clone()
    kernels.gemm(x, w, out=total, accumulate=True, out_dtype=torch.float32)
    assert_close(total, to_numpy(before) + oracle(*numpy[:2]))


@pytest.mark.parametrize("k", [2000, 2004, 8000])
@pytest.mark.parametrize("dtype", HALVES)
def test_float32_outputs_of_long_sums(device, dtype, k, normal, to_numpy):
    """Hopper's tensor cores cut sums off, so what they err grows with K: measured 1.2e-9 K of the norm."""
    x, w = normal(300, k, dtype=dtype, device=device), normal(200, k, dtype=dtype, device=device)
    reference = oracle(*to_numpy((x, w)))
    error = to_numpy(kernels.gemm(x, w, out_dtype=torch.float32)) - reference
    assert np.linalg.norm(error) < max(2e-6, 2e-9 * k) * np.linalg.norm(reference)


@pytest.mark.parametrize("dtype", HALVES)
def test_accumulate_in_halves_rounds_each_addend(device, dtype, normal):
    for n in (128, 130, 33):  # through the copy engine, by pairs, one by one
        x, w = normal(200, 64, dtype=dtype, device=device), normal(n, 64, dtype=dtype, device=device)
        before = normal(200, n, dtype=dtype, device=device)
        total = before.clone()
        kernels.gemm(x, w, out=total, accumulate=True)
        torch.testing.assert_close(total, before + kernels.gemm(x, w), rtol=0, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("shape", [(70, 64, 32), (65, 200, 72), (300, 136, 64), (5, 7, 9), (40, 1032, 512)])
def test_relu_mask_written_and_applied(device, dtype, shape, normal, to_numpy, assert_close):
    m, n, k = shape
    x, w, bias = (normal(*size, dtype=dtype, device=device) for size in ((m, k), (n, k), (n,)))
    y, mask = kernels.gemm(x, w, bias, relu=True, return_mask=True)
    assert_close(y, oracle(*to_numpy((x, w, bias)), relu=True))
    assert mask.shape == (m, -(-n // 64))
    assert torch.equal(_relu_mask.unpack(mask, n), y > 0)
    # The input gradient of a next layer with P outputs, masked by this layer's ReLU.
    dz, w2 = normal(m, 24, dtype=dtype, device=device), normal(24, n, dtype=dtype, device=device)
    masked = kernels.gemm(dz, w2.t(), mask=mask)
    assert bool((masked[y <= 0] == 0).all())
    assert_close(masked, np.where(to_numpy(y) > 0, to_numpy(dz) @ to_numpy(w2), 0))
    for view in (mask.t().contiguous().t(), mask.repeat_interleave(2, dim=0)[::2]):
        assert torch.equal(kernels.gemm(dz, w2.t(), mask=view), masked)


def test_relu_mask_packs_bits():
    y = torch.zeros(2, 70)
    y[0, 0] = y[0, 63] = y[1, 69] = 1
    y[1, 3] = float("nan")
    mask = _relu_mask.pack(y)
    assert mask.tolist() == [[1 - 2**63, 0], [0, 32]]
    assert torch.equal(_relu_mask.unpack(mask, 70), y > 0)


@pytest.mark.parametrize("precision", ["ieee", "highest", "high"])
@pytest.mark.parametrize("shape", [(5, 7, 9), (130, 260, 100), (64, 64, 4096), (300, 500, 1000), (1, 1, 1)])
def test_float32_precisions(device, precision, shape, normal, to_numpy):
    m, n, k = shape
    x, w, bias = normal(m, k, device=device), normal(n, k, device=device), normal(n, device=device)
    reference = oracle(*to_numpy((x, w, bias)), relu=True)
    y = to_numpy(kernels.gemm(x, w, bias, relu=True, precision=precision))
    error = np.linalg.norm(y - reference) / np.linalg.norm(reference)
    assert error < (1e-3 if precision == "high" else 1e-6)


@pytest.mark.gpu
def test_highest_is_no_less_accurate_than_sgemm(normal):
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    # enough to multiply that it is not handed to the float32 units; of the last the small tiles leave no second round
    for m, n, k in ((131_072, 640, 64), (32_768, 640, 256), (8192, 640, 1024), (2048, 640, 4096), (500, 1000, 1024)):
        x, w = normal(m, k, device=device), normal(n, k, device=device)
        with _load.launched() as launches:
            kernels.gemm(x, w, precision="highest")
        assert launches[-1].startswith("gemm_sm90")
        reference = x.double() @ w.double().t()
        sgemm = (x @ w.t()).double()  # PyTorch's default: cuBLAS in float32
        assert (kernels.gemm(x, w, precision="highest").double() - reference).norm() <= (sgemm - reference).norm()


@pytest.mark.gpu
def test_highest_scales_each_row(normal, to_numpy):
    device = torch.device("cuda", 0)
    of_tier("sm90", device)
    rows = 10.0 ** (torch.arange(2000, device=device) % 36 - 18)[:, None]
    x, w = normal(2000, 300, device=device) * rows, normal(600, 300, device=device)
    x[3] = 0
    y = kernels.gemm(x, w, precision="highest").double()
    reference = x.double() @ w.double().t()
    assert torch.equal(y[3], torch.zeros_like(y[3]))
    error = (y - reference).norm(dim=1) / reference.norm(dim=1).clamp(min=1e-300)
    assert bool((error < 1e-6).all())


def test_options_that_exclude_each_other_are_refused(normal):
    x, w = normal(4, 8), normal(5, 8)
    with pytest.raises(ValueError, match="accumulate adds to out"):
        kernels.gemm(x, w, accumulate=True)
    with pytest.raises(ValueError, match="exclude each other"):
        kernels.gemm(x, w, mask=torch.zeros(4, 1, dtype=torch.int64), return_mask=True)
    with pytest.raises(ValueError, match="mask must have shape"):
        kernels.gemm(x, w, mask=torch.zeros(4, 2, dtype=torch.int64))
    with pytest.raises(ValueError, match="precision must be one of"):
        kernels.gemm(x, w, precision="medium")
    with pytest.raises(TypeError, match="out_dtype"):
        kernels.gemm(x, w, out_dtype=torch.float16)
    with pytest.raises(ValueError, match="out is written in place"):
        kernels.gemm(x, w, out=torch.zeros(5, 4).t())


@pytest.mark.gpu
def test_a_tier_that_cannot_be_had_is_refused(normal):
    x, w = normal(4, 7, dtype=torch.float16, device="cuda"), normal(5, 7, dtype=torch.float16, device="cuda")
    with pytest.raises(ValueError, match="tier 'sm90' is not possible"):
        kernels.gemm(x, w, tier="sm90")


def test_configurations_are_checked():
    with pytest.raises(ValueError, match="cannot hold its share"):
        _gemm_sm90.Config(256, 256, 2, 3)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        _gemm_sm90.Config(128, 256, 2, 5)
    with pytest.raises(ValueError, match="either splits K or shares loads"):
        _gemm_sm90.Config(64, 64, 1, 4, cm=2, split=2)
    with pytest.raises(ValueError, match="cannot hold its share"):
        _gemm_single_sm90.Single(64, 192, 1, 4)
    with pytest.raises(ValueError, match="cannot divide the columns"):
        _gemm_single_sm90.Single(64, 32, 1, 4, split=8)
    with pytest.raises(ValueError, match="bytes of shared memory"):
        _gemm_single_sm90.Single(128, 256, 2, 5)


def test_no_block_of_a_cluster_is_launched_without_a_part_of_k():
    """It would wait for ever for its first tile."""
    divided = _gemm_single_sm90.Single(64, 64, 1, 4, split=4)
    assert divided.walk(17, 70, 193) == (1, 0)
    with pytest.raises(ValueError, match=r"does not suit \(17, 70, 192\)"):
        divided.walk(17, 70, 192)


def test_configurations_leave_room_for_what_the_epilogue_keeps():
    kept = [
        (4, (*_gemm_sm90_configs.TF32, *_gemm_sm90_configs.SPLIT)),  # a float bias
        (2, _gemm_sm90.CONFIGS),
        (_gemm_int8_sm90.COLUMN_BYTES, _gemm_int8_sm90.CONFIGS),
    ]
    for column_bytes, configs in kept:
        for config in configs:
            assert config.shared(column_bytes) <= _gemm_sm90_configs.SHARED_LIMIT, config


def test_the_tuning_table_is_valid():
    for (_, dtype, layout), rows in _gemm_sm90_configs.table().items():
        x_k, w_k = _gemm_sm90_configs.k_major(layout)
        for shape, config in rows.items():
            assert len(shape) == 3
            assert config.reads(x_k, w_k)
            if dtype == "int8":
                assert _gemm_int8_sm90.instance(config, torch.int8, torch.float16) in _gemm_int8_sm90.INSTANCES
            else:
                instances = (*_gemm_sm90.INSTANCES, *_gemm_single_sm90.INSTANCES)
                assert config.instance(getattr(torch, dtype), getattr(torch, dtype), x_k, w_k) in instances


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, *HALVES])
@pytest.mark.parametrize("seed", range(12))
def test_random_shapes_write_all_of_the_output_and_nothing_else(dtype, seed, normal, to_numpy, assert_close):
    """Sizes of 1 to 4,200, aligned or not, sliced operands, outputs at any offset between pages of a sentinel."""
    device, random = torch.device("cuda", 0), np.random.default_rng(seed)
    m, n, k = (int(size) for size in 2 ** random.uniform(0, 12.04, 3))
    if seed % 2:
        m, n, k = (-(-size // 8) * 8 for size in (m, n, k))
    x = normal(m, k + 8, dtype=dtype, device=device)[:, :k]
    w = normal(k, n + 8, dtype=dtype, device=device)[:, :n].t()
    guard, offset = 4096, int(random.integers(0, 9))
    memory = torch.full((2 * guard + offset + m * n,), 77.0, dtype=dtype, device=device)
    out = memory[guard + offset : guard + offset + m * n].view(m, n)
    out.fill_(torch.nan)
    kernels.gemm(x, w, relu=True, out=out)
    assert bool((memory[: guard + offset] == 77).all())
    assert bool((memory[guard + offset + m * n :] == 77).all())
    assert_close(out, oracle(*to_numpy((x, w)), relu=True))


@pytest.mark.gpu
def test_a_repeated_call_computes_anew(normal, to_numpy, assert_close):
    """The second call of a kind skips the checks: other arrays, addresses and options must not be mistaken for it."""
    device = torch.device("cuda", 0)
    memory = normal(128 * 64 + 8, dtype=torch.float16, device=device)
    w, bias = normal(96, 64, dtype=torch.float16, device=device), normal(96, dtype=torch.float16, device=device)
    for offset in (0, 8, 1, 0, 4):  # also off 16-byte boundaries, where another tier must run
        x = memory[offset : offset + 128 * 64].view(128, 64)
        for given_bias in (None, bias):
            for relu, alpha in ((False, 1.0), (True, 1.0), (True, 0.5)):
                y = kernels.gemm(x, w, given_bias, relu=relu, alpha=alpha)
                numpy_bias = None if given_bias is None else to_numpy(bias)
                assert_close(y, oracle(alpha * to_numpy(x), to_numpy(w), numpy_bias, relu=relu))
    with pytest.raises(ValueError, match="accumulate adds to out"):
        kernels.gemm(x, w, accumulate=True)
    with pytest.raises(TypeError, match="w must be an array"):
        kernels.gemm(x, w.cpu().numpy())
    x = memory[: 128 * 64].view(128, 64)
    for other, error in no_plain_memory(bias):
        kernels.gemm(x, w, bias)
        with pytest.raises(error, match=r"^bias "):
            kernels.gemm(x, w, other)


def no_plain_memory(a):
    """Arrays of the layout of ``a`` that are not what their memory holds, and how they are refused."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # a prototype
        yield torch.masked.masked_tensor(a, a > 0), TypeError
    yield torch._neg_view(a), ValueError


def test_a_call_is_known_again_by_the_types_and_signs_of_its_arrays_too(monkeypatch, normal):
    """Else an array that is not what its memory holds would be launched on as if it were."""
    launched = []
    monkeypatch.setattr(GEMM, "_routes", {})
    monkeypatch.setattr(GEMM, "new_matrix", lambda like, m, n: like.new_empty((m, n)))
    monkeypatch.setattr(_gemm_sm90, "launch_plan", lambda plan, *arrays: launched.append(plan) or "launched")
    arrays = x, w, bias = normal(16, 64), normal(32, 64), normal(32)
    GEMM._remember(x, w, None, False, "without bias")
    GEMM._remember(x, w, bias, False, "with bias")
    assert kernels.gemm(x, w) == kernels.gemm(x, w, bias) == "launched"
    assert launched == ["without bias", "with bias"]
    for at, name in enumerate(("x", "w", "bias")):
        for other, error in no_plain_memory(arrays[at]):
            for count in {3, max(2, at + 1)}:
                with pytest.raises(error, match=rf"^{name} "):
                    kernels.gemm(*[other if i == at else a for i, a in enumerate(arrays[:count])])
    assert len(launched) == 2
