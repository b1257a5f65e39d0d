"""Backward of bias and ReLU against its oracle."""

import pytest
import torch

from qsparse import kernels
from qsparse.oracles.bias_relu_grad import bias_relu_grad as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A block owns 32 columns and its warps take every eighth row.
SHAPES = [(0, 5), (5, 0), (1, 1), (7, 31), (8, 32), (9, 33), (100, 65), (3, 700), (700, 3), (300, 256)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("relu", [False, True])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_oracle(device, dtype, relu, shape, normal, to_numpy, assert_close):
    dy = normal(*shape, dtype=dtype, device=device)
    y = normal(*shape, dtype=dtype, device=device).relu() if relu else None
    dz, db = kernels.bias_relu_grad(dy, y)
    expected_dz, expected_db = oracle(to_numpy(dy), to_numpy(y))
    assert dz.dtype == db.dtype == dtype
    assert dz.device == db.device == device
    assert torch.equal(dz.cpu().double(), torch.from_numpy(expected_dz))
    assert_close(db, expected_db)


@pytest.mark.parametrize("m", [1, 2, 1000])
def test_sums_are_held_in_float32(device, m):
    """In float16 the running sum would stop at 2048, where 1 is below half an ulp."""
    dy = torch.ones(2048 + m * 2, 3, dtype=torch.float16, device=device)
    assert kernels.bias_relu_grad(dy)[1].tolist() == [2048 + m * 2] * 3


def test_zero_and_negative_zero_and_nan_outputs_pass_no_gradient(device):
    y = torch.tensor([[0.0, -0.0, float("nan"), 1e-45, float("inf"), -1.0]], device=device)
    dz, db = kernels.bias_relu_grad(torch.full_like(y, 2), y)
    assert dz.tolist() == [[0, 0, 0, 2, 2, 0]]
    assert db.tolist() == [0, 0, 0, 2, 2, 0]


def test_nan_stays_in_its_column(device, normal):
    dy = normal(20, 40, device=device)
    dy[3, 5] = float("nan")
    dy[4, 6] = float("inf")
    dz, db = kernels.bias_relu_grad(dy, torch.ones_like(dy))
    assert dz.isnan().sum() == 1
    assert db.isnan().nonzero().tolist() == [[5]]
    assert db.isinf().nonzero().tolist() == [[6]]
    masked = torch.ones_like(dy)
    masked[3:5] = 0
    assert kernels.bias_relu_grad(dy, masked)[1].isfinite().all()


@pytest.mark.parametrize("dtype", DTYPES)
def test_case_12_views(device, dtype, normal, to_numpy, assert_close):
    a, b = normal(20, 31, dtype=dtype, device=device), normal(20, 31, dtype=dtype, device=device)
    for view in (
        lambda t: t.t(),
        lambda t: t[::2],
        lambda t: t[:, 1:],
        lambda t: t.flip(1),
        lambda t: t[:1].expand(9, -1),
        lambda t: t[:1, :1].expand(9, 5),
    ):
        dz, db = kernels.bias_relu_grad(view(a), view(b))
        expected_dz, expected_db = oracle(to_numpy(view(a)), to_numpy(view(b)))
        assert_close(dz, expected_dz)
        assert_close(db, expected_db)
        assert_close(kernels.bias_relu_grad(view(a))[1], oracle(to_numpy(view(a)))[1])


def test_arguments_are_left_alone(device, normal):
    dy, y = normal(9, 40, device=device), normal(9, 40, device=device)
    before = dy.clone(), y.clone()
    kernels.bias_relu_grad(dy, y)
    assert torch.equal(dy, before[0])
    assert torch.equal(y, before[1])


def test_same_bits_every_run(device, normal):
    dy = normal(999, 70, device=device)
    assert torch.equal(kernels.bias_relu_grad(dy)[1], kernels.bias_relu_grad(dy)[1])


def test_refuses_what_does_not_fit(device, normal):
    dy = normal(4, 6, device=device)
    with pytest.raises(TypeError, match=r"^dy must be float32, float16, bfloat16, got float64"):
        kernels.bias_relu_grad(dy.double())
    with pytest.raises(TypeError, match=r"^y must be float32, got float16"):
        kernels.bias_relu_grad(dy, dy.half())
    with pytest.raises(ValueError, match=r"^dy must have shape \(any, any\), got \(6,\)"):
        kernels.bias_relu_grad(dy[0])
    with pytest.raises(ValueError, match=r"^y must have shape \(4, 6\), got \(6, 4\)"):
        kernels.bias_relu_grad(dy, dy.t())
