"""Training a sparse layer: gradients where entries are stored, against PyTorch's of the dense layer."""

import pytest
import torch

from qsparse import nn
from qsparse.sparse import to_coo, to_csr

DTYPES = [torch.float32, torch.float16, torch.bfloat16]
TOLERANCES = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> str:
    return request.param


def layer_of(format: str, w: torch.Tensor, bias, activation=None) -> nn.SparseLinear:
    """A trainable layer with the nonzeros of ``w``."""
    if format == "csr":
        layer = nn.SparseLinear.from_csr(*to_csr(w, w != 0), shape=w.shape, bias=bias, activation=activation)
    else:
        layer = nn.SparseLinear.from_coo(*to_coo(w, w != 0), shape=w.shape, bias=bias, activation=activation)
    return layer.make_trainable()


def weights(n: int, k: int, dtype=torch.float32, density: float = 0.2) -> torch.Tensor:
    generator = torch.Generator().manual_seed(n + k)
    kept = torch.rand((n, k), generator=generator) < density
    return torch.where(kept, torch.randn((n, k), generator=generator), 0).to(dtype)


def assert_near(ours, reference, dtype) -> None:
    error = (ours.double() - reference.double()).norm() / (reference.double().norm() or 1)
    assert error < TOLERANCES[dtype]


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("format", ["csr", "coo"])
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("shape", [(7, 40), (64, 40), (3, 5, 40), (0, 40)], ids=str)
def test_case_16_gradients_equal_the_dense_layer_s(device, dtype, format, activation, shape):
    w = weights(30, 40, dtype).to(device)
    bias = torch.linspace(-1, 1, 30, dtype=dtype, device=device)
    layer = layer_of(format, w, bias, activation)
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(shape, generator=generator).to(device, dtype).requires_grad_()
    y = layer(x)
    dy = torch.randn(y.shape, generator=generator).to(device, dtype)
    y.backward(dy)

    dense_w, dense_bias = (each.double().requires_grad_() for each in (w, bias))
    dense_x = x.detach().double().requires_grad_()
    dense_y = torch.nn.functional.linear(dense_x, dense_w, dense_bias)
    mask = (y.detach() > 0).double() if activation else 1.0  # of the outputs as they were rounded
    (dense_y * mask).backward(dy.double())
    assert_near(y.detach(), dense_y.detach() * mask, dtype)
    assert_near(x.grad, dense_x.grad, dtype)
    assert_near(layer.values.grad, dense_w.grad[w != 0], dtype)
    assert_near(layer.bias.grad, dense_bias.grad, dtype)
    assert layer.values.grad.shape == layer.values.shape


def test_what_needs_no_gradient_gets_none(device):
    layer = layer_of("csr", weights(6, 5).to(device), None)
    assert layer.bias is None
    layer(torch.randn(4, 5, device=device)).sum().backward()
    assert layer.values.grad is not None
    layer.values.requires_grad_(False)
    x = torch.randn(4, 5, device=device, requires_grad=True)
    layer(x).sum().backward()
    assert x.grad.isfinite().all()
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_case_17_momentum_and_weight_decay_bring_nothing_back(device):
    """What is not stored has nowhere to come back to; what is stored learns."""
    w = weights(12, 20).to(device)
    layer = layer_of("csr", w, torch.zeros(12, device=device))
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    generator = torch.Generator().manual_seed(2)
    x = torch.randn(50, 20, generator=generator).to(device)
    target = torch.randn(50, 12, generator=generator).to(device)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (layer(x) - target).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < 0.8 * losses[0]
    offsets, cols = layer.row_offsets.tolist(), layer.col_indices.tolist()
    assert [[n, k] for n in range(12) for k in cols[offsets[n] : offsets[n + 1]]] == (w != 0).nonzero().tolist()


def test_loading_other_indices_is_noticed(device):
    """The pattern is kept between calls, and forgotten when others are loaded into the same arrays."""
    first, second = weights(10, 9), weights(10, 9).flip(0)
    layer, other = layer_of("csr", first.to(device), None), layer_of("csr", second.to(device), None)
    x = torch.randn(20, 9, device=device, requires_grad=True)
    layer(x).sum().backward()
    layer.load_state_dict(other.state_dict())
    torch.testing.assert_close(layer(x), x @ second.to(device).t())
    x.grad = None
    layer(x).sum().backward()
    torch.testing.assert_close(x.grad, second.to(device).sum(dim=0).expand(20, -1))


@pytest.mark.gpu
def test_a_step_inside_a_cuda_graph():
    w = weights(64, 100).cuda()
    layer = layer_of("csr", w, None, "relu")
    x, dy = torch.randn(128, 100, device="cuda", requires_grad=True), torch.randn(128, 64, device="cuda")

    def step():
        return torch.autograd.grad(layer(x), (x, layer.values), dy)

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        expected = step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    graph.replay()
    torch.cuda.synchronize()
    for ours, theirs in zip(captured, expected, strict=True):
        assert torch.equal(ours, theirs)


@pytest.mark.gpu
def test_no_dense_gradient_is_made():
    n = k = 4096
    layer = layer_of("csr", torch.eye(n, device="cuda"), None)
    x = torch.randn(64, k, device="cuda", requires_grad=True)
    layer(x).sum().backward()
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    layer(x).sum().backward()
    assert torch.cuda.max_memory_allocated() - before < n * k * 4 / 4
