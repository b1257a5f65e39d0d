"""Every face inside ``torch.compile(fullgraph=True)``: one operator each, and the same results."""

from __future__ import annotations

import pytest
import torch

from qsparse import kernels, nn
from qsparse.models import MLP
from qsparse.quant import quantize
from qsparse.sparse import magnitude_masks, sparsify, to_csr

pytestmark = [
    pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning"),
    # Inductor's own, while it starts
    pytest.mark.filterwarnings("ignore:.*:DeprecationWarning:torch"),
]


@pytest.fixture(autouse=True)
def _no_poison(_poisoned_outputs):
    """The compiler refuses the deterministic mode that fills empty tensors; what is compared is complete anyhow."""
    torch.use_deterministic_algorithms(False)
    torch.compiler.reset()


def compiled(function):
    return torch.compile(function, fullgraph=True, backend="aot_eager")


def test_dense_faces(device, normal, assert_close, to_numpy):
    x, w, bias = normal(9, 16, device=device), normal(12, 16, device=device), normal(12, device=device)
    labels = torch.arange(9, device=device)

    def step(x, w, bias):
        y = kernels.gemm(x, w, bias, relu=True, alpha=0.5)
        losses, grad = kernels.softmax_cross_entropy(y, labels)
        dz, db = kernels.bias_relu_grad(grad, y)
        same, _ = kernels.bias_relu_grad(dz)
        return y, losses, dz, db, same

    for ours, reference in zip(compiled(step)(x, w, bias), step(x, w, bias), strict=True):
        assert_close(ours, to_numpy(reference))


def test_int8_and_sparse_faces(device, normal, sparse, assert_close, to_numpy):
    x = normal(9, 16, device=device)
    q_w, scale_w = kernels.quantize_rows(normal(12, 16, device=device))
    w = sparse(12, 16, 0.4)
    csr = [part.to(device) for part in to_csr(w, w != 0)]
    rows, cols = (w != 0).nonzero().int().to(device).unbind(1)

    def step(x):
        q, scale = kernels.quantize_rows(x)
        dense = kernels.gemm_int8(q, q_w, scale, scale_w, relu=True)
        by_csr = kernels.spmm_csr(x, *csr, shape=(12, 16), check=False)
        return dense, by_csr, kernels.spmm_coo(x, csr[0], rows, cols, shape=(12, 16), check=False)

    for ours, reference in zip(compiled(step)(x), step(x), strict=True):
        assert_close(ours, to_numpy(reference))


def test_int8_options(device, normal, assert_same_bits):
    """Every output and argument that the operators of the int8 path have."""
    x, bias = normal(9, 16, device=device), normal(12, device=device)
    w, scale_w, sums = kernels.quantize_rows(normal(12, 16, device=device), return_sums=True)
    scale = torch.full((1,), 0.03, device=device)

    def step(x):
        q, scale_x, zero, q_sums = kernels.quantize_rows(x, symmetric=False, relu=True, return_sums=True)
        fixed, fixed_scale = kernels.quantize_rows(x, scale)
        given = {"zero_x": zero, "sums_w": sums}
        again = kernels.gemm_int8(fixed, w, fixed_scale, scale_w, bias, out_dtype=torch.int8, scale_y=scale)
        bare = kernels.gemm_int8(q, w, out_dtype=torch.int32, **given)
        return q_sums, again, bare, kernels.gemm_int8(q, w, scale_x, scale_w, bias, out_dtype=torch.float16, **given)

    for ours, reference in zip(compiled(step)(x), step(x), strict=True):
        assert_same_bits(ours, reference)


def test_sgd_changes_its_arguments(device, normal):
    param, grad, buffer = (normal(5, 4, device=device) for _ in range(3))
    other, other_buffer = param.clone(), buffer.clone()
    options = {"momentum": 0.9, "weight_decay": 0.01}
    step = compiled(lambda p, g, b, lr: kernels.sgd(p, g, b, lr=lr, **options))
    for lr in (0.1, torch.tensor(0.2, device=device)):
        step(param, grad, buffer, lr)
        kernels.sgd(other, grad, other_buffer, lr=lr, **options)
        assert torch.equal(param, other)
        assert torch.equal(buffer, other_buffer)


def test_a_whole_network_trains_and_infers(device, normal):
    model = MLP((16, 12, 5)).to(device)
    x, labels = normal(7, 16, device=device), torch.arange(7, device=device) % 5

    def loss(x):
        return nn.cross_entropy(model(x), labels)

    loss(x).backward()
    expected = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    compiled(loss)(x).backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad, expected[name])

    masks = magnitude_masks({name: layer.weight.detach() for name, layer in model.layers().items()}, 0.5)
    for small in (quantize(model, "int8"), sparsify(model, masks, "csr"), sparsify(model, masks, "coo")):
        with torch.inference_mode():
            torch.testing.assert_close(compiled(small)(x), small(x))
