"""The product with int8 and int4 weights against float64, for every size of M, odd K, short groups and views."""

import importlib

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.kernels import _gemm_weight_only_sm80
from qsparse.kernels.gemm_weight_only import pack_int4, unpack_int4
from qsparse.oracles.gemm_weight_only import gemm_weight_only as oracle
from qsparse.oracles.gemm_weight_only import integers as oracle_integers

MODULE = importlib.import_module("qsparse.kernels.gemm_weight_only")  # the package's attribute is the function
DTYPES = (torch.float16, torch.bfloat16, torch.float32)
BITS = (8, 4)


@pytest.fixture
def weights(normal, integers):
    """``weights(n, k, bits, group, device)``: every integer that the bits hold, and scales unlike each other."""

    def draw(n: int, k: int, bits: int, group: int | None = None, device="cpu"):
        q = integers(-(2 ** (bits - 1)), 2 ** (bits - 1), n, k)
        shape = (n,) if group is None else (n, -(-k // group))
        scale = normal(*shape).abs() / 50 + 0.001
        return (q if bits == 8 else pack_int4(q)).to(device), scale.to(device)

    return draw


@pytest.fixture
def check(assert_close, to_numpy):
    """``check(y, x, w, scale, bias, group=, relu=)``: y is what the oracle says, in the dtype of x, row-major."""

    def compare(y, *arguments, **options) -> None:
        assert y.dtype == arguments[0].dtype
        assert y.is_contiguous()
        assert_close(y, oracle(*map(to_numpy, arguments), **options))

    return compare


def test_packing_puts_the_even_column_low():
    q = torch.tensor([[1, -2, 7, -8, 3]], dtype=torch.int8)
    assert pack_int4(q).tolist() == [[0xE1, 0x87, 0x03]]
    assert torch.equal(unpack_int4(pack_int4(q), 5), q)


@pytest.mark.parametrize("k", [0, 1, 2, 15, 16])
def test_packing_comes_back(k, integers):
    q = integers(-8, 8, 40, k)
    packed = pack_int4(q)
    assert packed.dtype == torch.uint8
    assert packed.shape == (40, -(-k // 2))
    assert torch.equal(unpack_int4(packed, k), q)
    assert np.array_equal(oracle_integers(packed.numpy(), k), q.numpy())
    assert torch.equal(pack_int4(q.float()), packed)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("m", [1, 9, 17, 64, 130, 600])
def test_every_number_of_rows(device, dtype, bits, m, normal, weights, check):
    for n, k in ((10, 784), (257, 1040)):
        x, bias = normal(m, k, dtype=dtype, device=device), normal(n, dtype=dtype, device=device)
        w, scale = weights(n, k, bits, device=device)
        check(kernels.gemm_weight_only(x, w, scale), x, w, scale)
        check(kernels.gemm_weight_only(x, w, scale, bias, relu=True), x, w, scale, bias, relu=True)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [32, 96, 128, 1000, 20])
def test_case_11_groups_whose_last_is_short(device, bits, group, normal, weights, check):
    for m, n, k in ((1, 70, 784), (40, 10, 2080), (400, 65, 784)):
        w, scale = weights(n, k, bits, group, device)
        for dtype in DTYPES[:2]:
            x, bias = normal(m, k, dtype=dtype, device=device), normal(n, dtype=dtype, device=device)
            check(kernels.gemm_weight_only(x, w, scale, bias, group=group), x, w, scale, bias, group=group)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("n", [1, 66])
def test_any_k_and_one_output(device, bits, n, normal, weights, check):
    for k in (1, 2, 7, 9, 31, 33, 100, 129, 783):
        w, scale = weights(n, k, bits, device=device)
        for m, dtype in ((1, DTYPES[0]), (5, DTYPES[1]), (33, DTYPES[0])):
            x = normal(m, k, dtype=dtype, device=device)
            check(kernels.gemm_weight_only(x, w, scale), x, w, scale)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [None, 32])
def test_case_5_and_13_empty(device, bits, group, normal, weights):
    for m, n, k in ((0, 10, 784), (5, 0, 784), (5, 10, 0), (0, 0, 0), (400, 10, 0)):
        for dtype in DTYPES:
            x, bias = normal(m, k, dtype=dtype, device=device), normal(n, dtype=dtype, device=device)
            w, scale = weights(n, k, bits, group, device)
            y = kernels.gemm_weight_only(x, w, scale, bias, group=group)
            assert torch.equal(y, bias.expand(m, n))
            assert torch.equal(kernels.gemm_weight_only(x, w, scale, group=group), torch.zeros_like(y))


VIEWS = {
    "transposed": lambda a: a.t().contiguous().t(),
    "every second row": lambda a: a.repeat_interleave(2, dim=0)[::2],
    "every second column": lambda a: a.repeat_interleave(2, dim=1)[:, ::2],
    "rows a byte or two apart": lambda a: torch.nn.functional.pad(a, (1, 2))[:, 1:-2],
    "rows 16 bytes apart": lambda a: torch.nn.functional.pad(a, (16, 16))[:, 16:-16],
    "rows 4 elements apart": lambda a: torch.nn.functional.pad(a, (4, 4))[:, 4:-4],
}


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("view", VIEWS)
def test_case_12_views(device, bits, view, normal, weights, check):
    for m in (3, 300):
        for k in (96, 101):
            x, (w, scale) = normal(m, k, dtype=torch.float16, device=device), weights(70, k, bits, device=device)
            bias = normal(2, 70, dtype=torch.float16, device=device).t()[:, 0]
            y = kernels.gemm_weight_only(VIEWS[view](x), VIEWS[view](w), VIEWS[view](scale[:, None])[:, 0], bias)
            check(y, x, w, scale, bias)


@pytest.mark.parametrize("bits", BITS)
def test_broadcast_views(device, bits, normal, weights, check):
    x, (w, scale) = normal(1, 64, dtype=torch.float16, device=device).expand(5, 64), weights(1, 64, bits, device=device)
    w, scale = w.expand(9, -1), scale.expand(9)
    check(kernels.gemm_weight_only(x, w, scale), x, w, scale)


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("group", [None, 32])
def test_case_6_scales_of_zero(device, bits, group, normal, weights):
    w, scale = weights(70, 100, bits, group, device)
    scale[5] = 0
    for m in (2, 300):
        y = kernels.gemm_weight_only(normal(m, 100, dtype=torch.float16, device=device), w, scale, group=group)
        assert (y[:, 5] == 0).all()
        assert (y == 0).sum() < m + 70


@pytest.mark.parametrize("bits", BITS)
@pytest.mark.parametrize("value", [np.nan, -np.inf])
def test_case_9_nan_and_inf_stay_in_their_row(device, bits, value, normal, weights):
    for m, dtype in ((5, DTYPES[0]), (20, DTYPES[1]), (300, DTYPES[0])):
        x, (w, scale) = normal(m, 200, dtype=dtype, device=device), weights(90, 200, bits, device=device)
        clean = kernels.gemm_weight_only(x, w, scale)
        x[3, 77] = value
        y = kernels.gemm_weight_only(x, w, scale)
        others = torch.arange(m) != 3
        assert not y[3].isfinite().any()
        assert torch.equal(y[others], clean[others])
        assert y[3].isnan().all() or not np.isnan(value)


def test_sums_are_exact_where_float32_is(device, integers):
    """Integers whose every partial sum float32 holds: any order, any split gives the same."""
    for k in (64, 1000, 4096):
        x, q = integers(-2, 3, 7, k, dtype=torch.float16), integers(-8, 8, 33, k)
        expected = (x.double() @ q.double().t()).to(torch.float16)
        for w in (q, pack_int4(q)):
            y = kernels.gemm_weight_only(x.to(device), w.to(device), torch.ones(33, device=device))
            assert torch.equal(y.cpu(), expected)


def test_the_same_bits_in_every_run(device, normal, weights):
    x, (w, scale) = normal(16, 4096, dtype=torch.float16, device=device), weights(64, 4096, 4, 128, device)
    first = kernels.gemm_weight_only(x, w, scale, group=128)
    assert all(torch.equal(kernels.gemm_weight_only(x, w, scale, group=128), first) for _ in range(5))


# Multiprocessors, and shared memory of a block and of a multiprocessor: an H200, an A100, an RTX 3090, an RTX 5090.
GPUS = {
    "9.0": (132, 232_448, 233_472),
    "8.0": (108, 166_912, 167_936),
    "8.6": (82, 101_376, 102_400),
    "12.0": (170, 101_376, 102_400),
}


@pytest.mark.parametrize("gpu", GPUS)
@pytest.mark.parametrize("bits", BITS)
def test_a_tile_for_every_shape_on_every_gpu(gpu, bits):
    for m in (1, 8, 9, 16, 17, 32, 33, 65, 256):
        for n, k in ((1, 1), (10, 784), (4096, 4096), (16384, 16384), (100, 10**6)):
            config, split = _gemm_weight_only_sm80.choose(bits, m, n, k, *GPUS[gpu])
            assert config.bits == bits
            assert config.shared <= GPUS[gpu][1]
            assert config.bm >= min(m, 32)
            assert 1 <= split <= max(1, -(-k // config.bk))


def test_where_there_are_tiles_enough_k_is_not_divided_into_single_slices():
    """A block that reads one slice takes longer to start and to store than to read."""
    for m, n, k in ((1, 13824, 5120), (1, 11008, 4096), (8, 5120, 8192), (16, 5120, 11008)):
        config, split = _gemm_weight_only_sm80.choose(8, m, n, k, *GPUS["9.0"])
        assert -(-k // config.bk) // split >= 2


def test_tiles_that_the_kernel_does_not_have_are_refused():
    for wrong in (
        (5, 16, 4, 2, 2, 256, 2),
        (8, 12, 4, 2, 2, 256, 2),
        (8, 16, 4, 2, 2, 256, 1),
        (8, 16, 4, 2, 4, 256, 2),
        (8, 24, 8, 2, 2, 256, 2),
        (8, 256, 8, 2, 2, 256, 2),
    ):
        with pytest.raises(ValueError, match=r"Config\(bits="):
            _gemm_weight_only_sm80.Config(*wrong)


@pytest.mark.gpu
@pytest.mark.parametrize("config", _gemm_weight_only_sm80.CONFIGS, ids=str)
def test_every_tile_and_split(config, normal, weights, check):
    for split, group in ((1, None), (2, 128), (3, 96), (8, 256)):
        for dtype, (m, n, k) in ((torch.float16, (config.bm, 300, 1537)), (torch.bfloat16, (config.bm + 3, 129, 2048))):
            x, bias = normal(m, k, dtype=dtype, device="cuda"), normal(n, dtype=dtype, device="cuda")
            w, scale = weights(n, k, config.bits, group, "cuda")
            y = torch.empty((m, n), dtype=dtype, device="cuda")
            operands = (x, k, w, w.stride(0), scale, group, bias, y)
            _gemm_weight_only_sm80.launch_gemm(*operands, relu=True, config=config, split=split)
            check(y, x, w, scale, bias, group=group, relu=True)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", BITS)
def test_tiers_agree(bits, normal, weights, assert_close, to_numpy):
    """What the tensor cores' tier chooses for shapes with and without a split, and weights as floats again."""
    for m, n, k in ((1, 10, 784), (16, 512, 8192), (40, 1000, 4096)):
        x, (w, scale) = normal(m, k, dtype=torch.float16, device="cuda"), weights(n, k, bits, 128, "cuda")
        dense = to_numpy(kernels.gemm_weight_only(x, w, scale, group=128, tier="simt"))
        assert_close(kernels.gemm_weight_only(x, w, scale, group=128, tier="sm80"), dense)


@pytest.mark.parametrize("packed", [True, False], ids=["torch._weight_int8pack_mm", "chunks"])
@pytest.mark.parametrize("shape", [(1, 1, 16), (7, 10, 784), (65, 33, 96)], ids=str)
def test_both_methods_of_the_cpu(packed, shape, normal, weights, check, monkeypatch):
    m, n, k = shape
    monkeypatch.setattr(MODULE, "_has_packed_product", lambda *_: packed)
    x, bias, (w, scale) = normal(m, k, dtype=torch.bfloat16), normal(n, dtype=torch.bfloat16), weights(n, k, 8)
    check(kernels.gemm_weight_only(x, w, scale, bias, relu=True), x, w, scale, bias, relu=True)


@pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch")  # PyTorch's own, while its compiler starts
def test_torch_compile_takes_it_whole(device, normal, weights, assert_same_bits):
    torch.use_deterministic_algorithms(False)  # the compiler refuses the mode that fills empty tensors
    torch.compiler.reset()
    x, bias = (normal(*size, dtype=torch.float16, device=device) for size in ((4, 96), (20,)))
    w, scale = weights(20, 96, 4, 32, device)

    def call(x, w, scale, bias):
        return kernels.gemm_weight_only(x, w, scale, bias, group=32, relu=True)

    compiled = torch.compile(call, fullgraph=True, backend="aot_eager")
    assert_same_bits(compiled(x, w, scale, bias), call(x, w, scale, bias).cpu())


def test_a_group_may_be_wider_than_the_rows(device):
    x, w, scale = torch.randn(4, 7, device=device), torch.ones(5, 7, dtype=torch.int8, device=device), torch.rand(5, 1)
    scale = scale.to(device)
    exact = kernels.gemm_weight_only(x, w, scale, group=7)
    assert torch.equal(kernels.gemm_weight_only(x, w, scale, group=10**30), exact)


def test_refuses_what_does_not_fit(device):
    x = torch.zeros((4, 7), dtype=torch.float16, device=device)
    w, packed = (torch.zeros((5, k), dtype=dtype, device=device) for k, dtype in ((7, torch.int8), (4, torch.uint8)))
    scale = torch.ones(5, device=device)
    call = kernels.gemm_weight_only
    with pytest.raises(TypeError, match=r"^x must be float32, float16, bfloat16, got float64"):
        call(x.double(), w, scale)
    with pytest.raises(TypeError, match=r"^w must be int8, uint8, got float16"):
        call(x, x, scale)
    with pytest.raises(ValueError, match=r"^w must have shape \(any, 7\), got \(5, 6\)"):
        call(x, w[:, :6], scale)
    with pytest.raises(ValueError, match=r"^w must have shape \(any, 4\), got \(5, 3\)"):
        call(x, packed[:, :3], scale)
    with pytest.raises(TypeError, match=r"^scale must be float32, got float64"):
        call(x, w, scale.double())
    with pytest.raises(ValueError, match=r"^scale must have shape \(5,\), got \(5, 1\)"):
        call(x, w, scale[:, None])
    with pytest.raises(ValueError, match=r"^scale must have shape \(5, 2\), got \(5,\)"):
        call(x, packed, scale, group=4)
    with pytest.raises(ValueError, match=r"^group must be at least 1, got 0"):
        call(x, w, scale, group=0)
    with pytest.raises(TypeError, match=r"^group must be an int, got float"):
        call(x, w, scale, group=2.0)
    with pytest.raises(TypeError, match=r"^bias must be float16, got float32"):
        call(x, w, scale, scale)
    with pytest.raises(ValueError, match=r"^bias must have shape \(5,\), got \(4,\)"):
        call(x, w, scale, x[:, 0])
