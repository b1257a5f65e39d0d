"""Softmax and cross-entropy against the oracle and PyTorch's autograd."""

import pytest
import torch
from torch.nn import functional

from qsparse import kernels
from qsparse.oracles.softmax_cross_entropy import softmax_cross_entropy as oracle

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
# A warp owns a row, a block eight rows.
SHAPES = [(0, 10), (1, 1), (1, 10), (7, 31), (8, 32), (9, 33), (64, 10), (1000, 10), (5, 700), (300, 257)]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_the_oracle(device, dtype, shape, normal, integers, to_numpy, assert_close):
    logits = 3 * normal(*shape, dtype=dtype, device=device)
    labels = integers(0, shape[1], shape[0], dtype=torch.int64, device=device)
    losses, grad = kernels.softmax_cross_entropy(logits, labels)
    expected_losses, expected_grad = oracle(to_numpy(logits), to_numpy(labels))
    assert losses.dtype == torch.float32
    assert grad.dtype == dtype
    assert losses.device == grad.device == device
    assert_close(losses, expected_losses)
    assert_close(grad, expected_grad)


def test_matches_autograd(device, normal, integers, assert_close):
    logits, labels = normal(40, 10, device=device), integers(0, 10, 40, dtype=torch.int64, device=device)
    peer = logits.double().cpu().requires_grad_()
    loss = functional.cross_entropy(peer, labels.cpu())
    loss.backward()
    losses, grad = kernels.softmax_cross_entropy(logits, labels)
    assert_close(losses.mean(), loss.detach())
    assert_close(grad, peer.grad)


@pytest.mark.parametrize("dtype", DTYPES)
def test_huge_logits_do_not_overflow(device, dtype, to_numpy, assert_close):
    big = 1e4
    rows = [[big, -big, 0], [big, big, big], [-big, -big, -big], [big, big - 64, -big], [0, -big, -big]]
    logits = torch.tensor(rows, dtype=dtype, device=device)
    for label in range(3):
        labels = torch.full((5,), label, device=device)
        losses, grad = kernels.softmax_cross_entropy(logits, labels)
        expected_losses, expected_grad = oracle(to_numpy(logits), to_numpy(labels))
        assert_close(losses, expected_losses)
        assert_close(grad, expected_grad)


def test_minus_infinity_is_a_class_that_cannot_be(device):
    logits = torch.tensor([[0.0, -float("inf"), 0.0], [-float("inf"), 1.0, -float("inf")]], device=device)
    losses, grad = kernels.softmax_cross_entropy(logits, torch.tensor([0, 1], device=device))
    assert losses.tolist() == pytest.approx([0.6931472, 0])
    assert grad[0].tolist() == pytest.approx([-0.25, 0, 0.25])
    assert grad[1].tolist() == [0, 0, 0]
    losses, grad = kernels.softmax_cross_entropy(logits, torch.tensor([1, 1], device=device))
    assert losses.tolist() == [float("inf"), 0]
    assert grad.isfinite().all()


@pytest.mark.parametrize("label", [-1, 10, -100, 2**40, -(2**62)])
def test_a_label_outside_gives_nan_in_its_row_alone(device, label, normal):
    logits = normal(20, 10, device=device)
    labels = torch.arange(20, device=device) % 10
    clean_losses, clean_grad = kernels.softmax_cross_entropy(logits, labels)
    labels[4] = label
    losses, grad = kernels.softmax_cross_entropy(logits, labels)
    others = [m for m in range(20) if m != 4]
    assert torch.equal(losses[others], clean_losses[others])
    assert torch.equal(grad[others], clean_grad[others])
    assert losses[4].isnan()
    assert grad[4].isnan().all()


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("column", [0, 3, 39])
def test_case_9_what_is_not_finite_poisons_its_row_alone(device, value, column, normal):
    logits = normal(20, 40, device=device)
    logits[4, column] = value
    losses, grad = kernels.softmax_cross_entropy(logits, torch.full((20,), 3, device=device))
    assert losses.isnan().nonzero().tolist() == [[4]]
    assert grad.isnan().any(1).nonzero().tolist() == [[4]]


def test_case_12_views(device, normal, to_numpy, assert_close):
    a = normal(20, 31, device=device)
    labels = torch.arange(62, device=device) % 5
    for view in (a.t(), a[::2], a[:, 1:], a.flip(1), a[:1].expand(9, -1), a[:, :1].expand(-1, 9)):
        chosen = labels[::2][: len(view)]
        losses, grad = kernels.softmax_cross_entropy(view, chosen)
        expected_losses, expected_grad = oracle(to_numpy(view), to_numpy(chosen))
        assert_close(losses, expected_losses)
        assert_close(grad, expected_grad)
        assert grad.is_contiguous()


def test_refuses_what_does_not_fit(device, normal):
    logits, labels = normal(4, 10, device=device), torch.zeros(4, dtype=torch.int64, device=device)
    with pytest.raises(TypeError, match=r"^logits must be float32, float16, bfloat16, got float64"):
        kernels.softmax_cross_entropy(logits.double(), labels)
    with pytest.raises(TypeError, match=r"^labels must be int64, got int32"):
        kernels.softmax_cross_entropy(logits, labels.int())
    with pytest.raises(ValueError, match=r"^labels must have shape \(4,\), got \(3,\)"):
        kernels.softmax_cross_entropy(logits, labels[:3])
    with pytest.raises(ValueError, match=r"^logits must have shape \(any, any\), got \(10,\)"):
        kernels.softmax_cross_entropy(logits[0], labels)
    with pytest.raises(ValueError, match=r"^logits must have at least one column"):
        kernels.softmax_cross_entropy(logits[:, :0], labels)
