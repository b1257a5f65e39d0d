"""One step of SGD against its oracle and PyTorch's optimiser; pruned weights stay zero."""

import pytest
import torch

from qsparse import kernels
from qsparse.oracles.sgd import sgd as oracle

RECIPES = [
    {"lr": 0.1},
    {"lr": 0.1, "momentum": 0.9},
    {"lr": 0.05, "weight_decay": 0.01},
    {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1},
]


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
@pytest.mark.parametrize("shape", [(), (0,), (1,), (255,), (256,), (257,), (33, 65), (3, 4, 5), (1000, 7)], ids=str)
@pytest.mark.parametrize("masked", [False, True])
def test_matches_the_oracle(device, recipe, shape, masked, normal, to_numpy, assert_close):
    param, grad, velocity = (normal(*shape, device=device) for _ in range(3))
    mask = normal(*shape, device=device) > 0 if masked else None
    if "momentum" not in recipe:
        velocity = None
    expected_param, expected_velocity = oracle(*map(to_numpy, (param, grad, velocity)), **recipe, mask=to_numpy(mask))
    kept = param.data_ptr()
    assert kernels.sgd(param, grad, velocity, **recipe, mask=mask) is None
    assert param.data_ptr() == kept
    assert_close(param, expected_param)
    if velocity is not None:
        assert_close(velocity, expected_velocity)


@pytest.mark.parametrize("recipe", RECIPES, ids=str)
def test_follows_pytorch_over_several_steps(device, recipe, normal, to_numpy, assert_close):
    param = normal(30, 40, device=device)
    velocity = torch.zeros_like(param) if "momentum" in recipe else None
    peer = torch.nn.Parameter(param.double().cpu())
    optimizer = torch.optim.SGD([peer], **recipe)
    for _ in range(6):
        grad = normal(30, 40, device=device)
        kernels.sgd(param, grad, velocity, **recipe)
        peer.grad = grad.double().cpu()
        optimizer.step()
        assert_close(param, to_numpy(peer))


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), 1e38])
def test_case_17_masked_weights_stay_exactly_zero(device, bad, normal):
    """Whatever pulls at a pruned weight: its old value, momentum, weight decay, or a gradient that is not finite."""
    param, velocity = normal(20, 30, device=device), normal(20, 30, device=device)
    mask = normal(20, 30, device=device) > 0
    for _ in range(3):
        grad = torch.where(mask, normal(20, 30, device=device), bad)
        kernels.sgd(param, grad, velocity, lr=0.1, momentum=0.9, weight_decay=0.1, mask=mask)
        for value in (param, velocity):
            assert (value[~mask] == 0).all()
            assert value[mask].isfinite().all()
            assert (value[mask] != 0).all()


def test_a_parameter_that_requires_grad(device, normal):
    param = torch.nn.Parameter(normal(5, device=device))
    before = param.detach().clone()
    kernels.sgd(param, torch.ones_like(before), lr=1.0, mask=torch.ones(5, dtype=torch.bool, device=device))
    assert torch.equal(param.detach(), before - 1)


def test_grad_and_mask_may_be_views(device, normal, to_numpy, assert_close):
    param, grad, mask = normal(6, 7, device=device), normal(7, 6, device=device).t(), normal(6, 14, device=device) > 0
    expected, _ = oracle(to_numpy(param), to_numpy(grad), lr=0.3, mask=to_numpy(mask[:, ::2]))
    kernels.sgd(param, grad, lr=0.3, mask=mask[:, ::2])
    assert_close(param, expected)
    kernels.sgd(param, torch.ones((), device=device).expand(6, 7), lr=0.5)
    assert_close(param, expected - 0.5)


def test_nan_in_the_gradient_reaches_its_weight_alone(device):
    param = torch.ones(300, device=device)
    grad = torch.zeros(300, device=device)
    grad[7] = float("nan")
    kernels.sgd(param, grad, lr=0.1)
    assert param.isnan().nonzero().tolist() == [[7]]


def test_refuses_what_does_not_fit(device, normal):
    param = normal(4, 6, device=device)
    with pytest.raises(TypeError, match=r"^param must be float32, got float16"):
        kernels.sgd(param.half(), param, lr=0.1)
    with pytest.raises(TypeError, match=r"^param must be an? .*got float"):
        kernels.sgd(1.0, param, lr=0.1)
    with pytest.raises(TypeError, match=r"^grad must be float32, got float16"):
        kernels.sgd(param, param.half(), lr=0.1)
    with pytest.raises(ValueError, match=r"^grad must have shape \(4, 6\), got \(6, 4\)"):
        kernels.sgd(param, param.t(), lr=0.1)
    with pytest.raises(ValueError, match=r"^momentum_buffer must have shape \(4, 6\), got \(4, 5\)"):
        kernels.sgd(param, param, param[:, 1:], lr=0.1)
    with pytest.raises(ValueError, match=r"^momentum is 0\.9, so a momentum_buffer is needed"):
        kernels.sgd(param, param, lr=0.1, momentum=0.9)
    with pytest.raises(TypeError, match=r"^mask must be bool, got float32"):
        kernels.sgd(param, param, lr=0.1, mask=param)
    with pytest.raises(ValueError, match=r"^param is changed in place and must be contiguous"):
        kernels.sgd(param.t(), param.t(), lr=0.1)
    with pytest.raises(ValueError, match=r"^momentum_buffer is changed in place and must be contiguous"):
        kernels.sgd(param, param, normal(6, 4, device=device).t(), lr=0.1)


@pytest.mark.parametrize("shape", [(), (1,), (1, 1)], ids=str)
def test_the_learning_rate_may_be_an_array(device, shape, normal, assert_same_bits):
    param, grad = normal(30, 40, device=device), normal(30, 40, device=device)
    other = param.clone()
    kernels.sgd(param, grad, lr=torch.full(shape, 0.3, device=device))
    kernels.sgd(other, grad, lr=0.3)
    assert_same_bits(param, other)
    with pytest.raises(ValueError, match=r"^lr must have shape \(1,\), got \(2,\)"):
        kernels.sgd(param, grad, lr=torch.ones(2, device=device))
    with pytest.raises(TypeError, match=r"^lr must be float32, got float64"):
        kernels.sgd(param, grad, lr=torch.ones(1, device=device, dtype=torch.float64))


@pytest.mark.gpu
@pytest.mark.parametrize("device", ["cuda:0"])
def test_replays_of_a_graph_differ_in_the_learning_rate(device, normal):
    param, rate = torch.zeros(5, device=device), torch.ones(1, device=device)
    kernels.sgd(param, torch.zeros(5, device=device), lr=rate)  # compiles
    grad = torch.ones(5, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        kernels.sgd(param, grad, lr=rate)
    for lr in (1.0, 2.0, 0.5):
        rate.fill_(lr)
        graph.replay()
    assert (param == -3.5).all()
