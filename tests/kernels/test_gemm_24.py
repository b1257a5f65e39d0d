"""The product with 2:4 weights: what the metadata names is multiplied, nothing else, for every shape and tier."""

from __future__ import annotations

import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _gemm_24_sm80, _gemm_24_sm90, _load, _two_four
from qsparse.kernels._gemm_24_sm90 import Config
from qsparse.oracles.gemm_24 import gemm_24 as oracle
from qsparse.sparse import compress_24

DTYPES = (torch.float16, torch.bfloat16)


TIERS = ("simt", "sm80", "sm90")  # worst first


@pytest.fixture(params=["cpu", *(pytest.param(tier, marks=pytest.mark.gpu) for tier in TIERS)])
def device(request, monkeypatch) -> torch.device:
    """The CPU, and the GPU once a tier: the best that may be taken; what it does not take goes to a lower one."""
    if request.param == "cpu":
        return torch.device("cpu")
    device = torch.device("cuda", 0)
    best = kernels.gemm_24.tier(device)
    if TIERS.index(request.param) > TIERS.index(best):
        pytest.skip(f"this GPU's best tier is {best}")
    monkeypatch.setattr(kernels.gemm_24, "tier", lambda device: request.param)
    return device


def two_of_four(n, k, normal, dtype=torch.float16, density=1.0):
    """A random (N, K) matrix of which every four neighbouring columns keep two at most, dense and compressed."""
    generator = torch.Generator().manual_seed(n + k)
    rank = torch.rand((n, -(-k // 4), 4), generator=generator).argsort(dim=2)
    kept = ((rank < 2) & (torch.rand(rank.shape, generator=generator) < density)).reshape(n, -(-k // 4) * 4)[:, :k]
    w = torch.where(kept, normal(n, k), 0).to(dtype)
    return w, *compress_24(w)


def check(y, x, values, metadata, bias, relu, assert_close, to_numpy):
    assert_close(y, oracle(*to_numpy((x, values, metadata, bias)), relu=relu))


SHAPES = [(1, 10, 784), (17, 64, 32), (64, 256, 784), (130, 200, 1024), (300, 129, 2056), (257, 520, 129), (5, 7, 3)]


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("dtype", [*DTYPES, torch.float32])
def test_against_the_oracle(device, normal, shape, dtype, assert_close, to_numpy):
    m, n, k = shape
    x, bias = normal(m, k, dtype=dtype, device=device), normal(n, dtype=dtype, device=device)
    _, values, metadata = (a.to(device) for a in two_of_four(n, k, normal, dtype))
    for relu in (False, True):
        for out_dtype in (dtype, torch.float32):
            y = kernels.gemm_24(x, values, metadata, bias, relu=relu, out_dtype=out_dtype)
            assert y.dtype == out_dtype
            assert_close(y, oracle(*to_numpy((x, values, metadata, bias)), relu=relu), dtype)
    check(kernels.gemm_24(x, values, metadata), x, values, metadata, None, False, assert_close, to_numpy)


@pytest.mark.parametrize("shape", [(0, 5, 16), (5, 0, 16), (3, 4, 0), (0, 0, 0), (1, 1, 1), (9, 7, 33)])
def test_empty_and_odd_shapes(device, normal, shape, assert_close, to_numpy):
    m, n, k = shape
    x, bias = normal(m, k, dtype=torch.float16, device=device), normal(n, dtype=torch.float16, device=device)
    _, values, metadata = (a.to(device) for a in two_of_four(n, k, normal))
    y = kernels.gemm_24(x, values, metadata, bias)
    check(y, x, values, metadata, bias, False, assert_close, to_numpy)


def test_every_pattern_in_every_place(device, to_numpy):
    """One weight at a time of a 64 x 128 tile: its output is x's very element, and all the others are zero."""
    n, k = 64, 128
    x = (
        torch.arange(1, k + 1, dtype=torch.float16, device=device)[None].repeat(3, 1)
        + 1000 * torch.arange(3, device=device, dtype=torch.float16).view(3, 1) / 1000
    )
    for first, second in ((0, 1), (0, 2), (0, 3), (1, 2), (1, 3), (2, 3)):
        nibble = first | second << 2
        metadata = torch.full((n, k // 8), nibble | nibble << 4, dtype=torch.uint8, device=device)
        for at in range(0, k // 2, 5):
            values = torch.zeros((n, k // 2), dtype=torch.float16, device=device)
            column = at // 2 * 4 + (second if at % 2 else first)
            values[:, at] = 1
            y = kernels.gemm_24(x, values, metadata)
            assert torch.equal(y, x[:, column, None].expand(-1, n))


def test_groups_that_keep_fewer_than_two(device, normal, assert_close, to_numpy):
    for density in (0.0, 0.3):
        w, values, metadata = two_of_four(140, 96, normal, density=density)
        x = normal(33, 96, dtype=torch.float16, device=device)
        y = kernels.gemm_24(x, values.to(device), metadata.to(device))
        assert_close(y, to_numpy(x) @ to_numpy(w).T)


def test_views_and_padded_rows(device, normal, assert_close, to_numpy):
    w, values, metadata = two_of_four(70, 256, normal)
    x = normal(256, 80, dtype=torch.float16, device=device).t()
    wide_values = torch.full((70, 200), torch.nan, dtype=torch.float16, device=device)
    wide_metadata = torch.full((70, 48), 255, dtype=torch.uint8, device=device)
    wide_values[:, :128], wide_metadata[:, :32] = values.to(device), metadata.to(device)
    for each in (x, x.contiguous(), x[::2], x.flip(0)):
        y = kernels.gemm_24(each, wide_values[:, :128], wide_metadata[:, :32])
        assert_close(y, to_numpy(each) @ to_numpy(w).T)
    y = kernels.gemm_24(x, wide_values[:, :128][::2], wide_metadata[:, :32][::2])
    assert_close(y, to_numpy(x) @ to_numpy(w[::2]).T)


def test_nan_of_an_activation_stays_in_its_row(device, normal):
    _, values, metadata = (a.to(device) for a in two_of_four(24, 64, normal))
    x = normal(20, 64, dtype=torch.float16, device=device)
    x[3] = torch.nan
    for relu in (False, True):
        y = kernels.gemm_24(x, values, metadata, relu=relu)
        assert y[3].isnan().all()
        assert not y[[i for i in range(20) if i != 3]].isnan().any()


def test_refuses_what_does_not_fit(device, normal):
    _, values, metadata = (a.to(device) for a in two_of_four(6, 24, normal))
    x = normal(4, 24, dtype=torch.float16, device=device)
    with pytest.raises(TypeError, match="x must be float32, float16, bfloat16, got float64"):
        kernels.gemm_24(x.double(), values, metadata)
    with pytest.raises(TypeError, match="values must be float16, got bfloat16"):
        kernels.gemm_24(x, values.bfloat16(), metadata)
    with pytest.raises(ValueError, match=r"values must have shape \(any, 12\), got \(6, 11\)"):
        kernels.gemm_24(x, values[:, :11], metadata)
    with pytest.raises(ValueError, match=r"metadata must have shape \(6, 3\), got \(6, 2\)"):
        kernels.gemm_24(x, values, metadata[:, :2])
    with pytest.raises(TypeError, match="metadata must be uint8"):
        kernels.gemm_24(x, values, metadata.int())
    with pytest.raises(ValueError, match=r"bias must have shape \(6,\)"):
        kernels.gemm_24(x, values, metadata, x[0])
    with pytest.raises(TypeError, match=r"out_dtype must be one of torch\.float16, torch\.float32, got torch"):
        kernels.gemm_24(x, values, metadata, out_dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="tier 'sm70' is not possible"):
        kernels.gemm_24(x, values, metadata, tier="sm70")


SM90_CONFIGS = sorted({*_gemm_24_sm90.CONFIGS, *_gemm_24_sm90.FEW}, key=str)
CONFIGS = [*((_gemm_24_sm80, config) for config in _gemm_24_sm80.CONFIGS), *((_gemm_24_sm90, c) for c in SM90_CONFIGS)]


@pytest.mark.gpu
@pytest.mark.parametrize(("module", "config"), CONFIGS, ids=str)
def test_every_configuration(module, config, normal, assert_close, to_numpy):
    """Whole tiles, parts of them, more tiles than blocks, K shorter and longer than the pipeline, rows off 16 bytes."""
    device = torch.device("cuda", 0)
    tier = _load.tier_of(module.SOURCE)
    if TIERS.index(tier) > TIERS.index(kernels.gemm_24.tier(device)):
        pytest.skip(f"this GPU has no {tier} tier")
    shapes = [(1, 8, 32), (512, 512, 512), (257, 136, 96), (100, 77, 1056), (1500, 1160, 96), (3000, 2056, 64)]
    if tier == "sm90":
        shapes += [(257, 136, 40), (100, 77, 1032), (64, 64, 8)]
    for m, n, k in shapes:
        x, bias = normal(m, k, dtype=torch.float16, device=device), normal(n, dtype=torch.float16, device=device)
        w, values, metadata = (a.to(device) for a in two_of_four(n, k, normal))
        y = torch.full((m, n), torch.nan, dtype=torch.float16, device=device)
        module.launch_gemm(x, values, metadata, y, (bias, False), config)
        assert_close(y, (x.double() @ w.double().t() + bias.double()).cpu().numpy())


@pytest.mark.gpu
def test_the_tensor_cores_are_taken_where_they_can_be(normal):
    device = torch.device("cuda", 0)
    if kernels.gemm_24.tier(device) != "sm90":
        pytest.skip("this GPU has no sm90 tier")
    for k in (7, 8, 64, 783, 784):
        _, values, metadata = (a.to(device) for a in two_of_four(24, k, normal))
        x = normal(20, k, dtype=torch.float16, device=device)
        kernels.gemm_24(x, values, metadata)  # packs the metadata, which is kept
        with _load.launched() as launches:
            kernels.gemm_24(x, values, metadata)
        assert [_load.tier_of(launch.partition(":")[0]) for launch in launches] == ["sm90"]
    x = normal(20, 784, device=device)
    with pytest.raises(ValueError, match="tier 'sm90' is not possible for these arguments on this GPU; simt is"):
        kernels.gemm_24(x, values.float(), metadata, tier="sm90")
    x, values, metadata = (a.to(device) for a in (normal(20, 64).half(), *two_of_four(24, 64, normal)[1:]))
    for tier, source in (("sm80", "gemm_24_sm80.cu"), ("simt", "gemm_24.cu")):
        with _load.launched() as launches:
            kernels.gemm_24(x, values, metadata, tier=tier)
        assert launches[0].partition(":")[0] == source


def test_what_is_made_of_weights_is_kept_while_they_are_the_same(device):
    def padded(a):
        return _two_four.kept(a, _two_four.on_boundaries)

    a = torch.arange(3 * 98, dtype=torch.uint8, device=device).view(3, 98)
    first = padded(a)
    assert first.stride(0) % 16 == 0
    assert torch.equal(first, a)
    assert padded(a) is first
    a[1, 3] = 7
    again = padded(a)
    assert torch.equal(again, a)
    assert again.data_ptr() == first.data_ptr()  # a captured graph may read it
    with torch.inference_mode():
        b = torch.zeros((3, 98), dtype=torch.uint8, device=device)
        for value in (1, 2):
            b.fill_(value)
            assert torch.equal(padded(b), b)
        with torch.inference_mode(False):
            d = a.clone()
        kept = padded(d)
    d.add_(1)  # outside the mode that what is kept of it was made in
    assert torch.equal(padded(d), d)
    assert padded(d) is kept
    whole = torch.zeros((3, 32), dtype=torch.uint8, device=device)
    assert padded(whole) is whole
    key = id(a), _two_four.on_boundaries
    assert key in _two_four._kept
    del a
    assert key not in _two_four._kept


def test_the_choice_of_a_configuration():
    built, few = _gemm_24_sm90.CONFIGS, _gemm_24_sm90.FEW
    chosen = {
        (8192, 8192, 8192): _gemm_24_sm90.BIG,
        (2048, 2048, 2048): _gemm_24_sm90.ALONE,
        (60_000, 256, 784): _gemm_24_sm90.BIG,
        (2048, 1024, 4096): _gemm_24_sm90.SQUARE,
        (1024, 1024, 1024): _gemm_24_sm90.SMALL,
        (64, 4096, 784): _gemm_24_sm90.SMALL,
        (64, 4096, 4096): _gemm_24_sm90.FEW_ROWS,
        (1, 4096, 4096): _gemm_24_sm90.FEWER_ROWS,
    }
    assert {shape: _gemm_24_sm90.choose(*shape, built, 132) for shape in chosen} == chosen
    assert _gemm_24_sm90.choose(4096, 4096, 64, few, 132) == few[0]
    assert _gemm_24_sm90.choose(1, 1, 1, few, 132) == few[1]


def test_configurations_fit_hopper():
    for config in SM90_CONFIGS:
        for size, out_bytes in ((1, 2), (2, 2)):
            assert config.shared(size, out_bytes) <= 227 * 1024
    for config in _gemm_24_sm90.FEW:
        for size, out_bytes in ((1, 1), (1, 4), (2, 4)):
            assert config.shared(size, out_bytes) <= 227 * 1024
    assert _gemm_24_sm90.BIG.panels(2, 2) == (32, 16384)  # y finds room beside the stages of halves
    assert _gemm_24_sm90.BIG.panels(1, 2) == (64, 0)  # but not beside those of 8-bit values, whose epilogue has scales
    for wrong, why in (
        ({"bo": 128, "bb": 256, "consumers": 2, "stages": 6}, "bytes of shared memory"),
        ({"bo": 96, "bb": 256, "consumers": 1, "stages": 2}, "divide the tile"),
        ({"bo": 256, "bb": 256, "consumers": 2, "stages": 2}, "cannot hold its share"),
        ({"bo": 64, "bb": 16, "consumers": 1, "stages": 2, "co": 4}, "cannot divide the loads"),
        ({"bo": 64, "bb": 64, "consumers": 1, "stages": 2, "co": 2, "split": 2}, "either splits K or shares loads"),
        ({"bo": 64, "bb": 128, "consumers": 1, "stages": 1, "split": 2}, "partial sums do not fit"),
    ):
        with pytest.raises(ValueError, match=why):
            Config(**wrong)


@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")  # Inductor's own, while it starts
def test_compiled(device, normal):
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()
    _, values, metadata = (a.to(device) for a in two_of_four(16, 32, normal))
    x = normal(16, 32, dtype=torch.float16, device=device)
    compiled = torch.compile(
        lambda x: kernels.gemm_24(x, values, metadata, relu=True), fullgraph=True, backend="aot_eager"
    )
    assert torch.equal(compiled(x), kernels.gemm_24(x, values, metadata, relu=True))
