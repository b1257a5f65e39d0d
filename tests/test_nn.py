"""The layers: forward and backward against PyTorch in float64, int8 and sparse against the oracles, and their files."""

from __future__ import annotations

import json

import numpy as np
import pytest
import torch
from torch.nn import functional

from qsparse import nn
from qsparse.oracles.gemm_int8 import gemm_int8 as int8_oracle
from qsparse.oracles.gemm_weight_only import gemm_weight_only as weight_only_oracle
from qsparse.oracles.quantize_rows import quantize_rows as quantize_oracle
from qsparse.sparse import to_entry_tiles

TOLERANCE = {torch.float32: 2e-6, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}  # relative, by the norm


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture(autouse=True)
def _seeded():
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(30)
        yield


def error(out, reference) -> float:
    out, reference = (value.detach().cpu().double() for value in (out, reference))
    assert out.shape == reference.shape
    return float((out - reference).norm() / (reference.norm() or 1))


# --- Linear ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(7, 20), (130, 20), (3, 5, 20), (20,), (0, 20), (2, 0, 20)], ids=str)
def test_linear_forward_and_backward(device, dtype, activation, bias, shape):
    layer = nn.Linear(20, 33, bias, activation).to(device, dtype)
    x = torch.randn(shape).to(device, dtype).requires_grad_()
    dy = torch.randn(*shape[:-1], 33).to(device, dtype)
    y = layer(x)
    y.backward(dy)
    assert y.dtype == dtype
    assert layer.weight.grad.dtype == dtype

    peer = torch.nn.Linear(20, 33, bias, dtype=torch.float64)
    peer.load_state_dict({name: value.double().cpu() for name, value in layer.state_dict().items()})
    peer_x = x.detach().cpu().double().requires_grad_()
    peer_y = peer(peer_x)
    assert error(y, functional.relu(peer_y) if activation else peer_y) < TOLERANCE[dtype]
    # The gate that was taken, not the one of exact numbers: an output that rounds to zero differs
    peer_y.backward(torch.where(y.detach().cpu() > 0, dy.cpu().double(), 0) if activation else dy.cpu().double())
    assert error(x.grad, peer_x.grad) < TOLERANCE[dtype]
    assert error(layer.weight.grad, peer.weight.grad) < TOLERANCE[dtype]
    if bias:
        assert error(layer.bias.grad, peer.bias.grad) < TOLERANCE[dtype]


def test_linear_backward_of_what_is_needed_only(device):
    layer = nn.Linear(6, 4, activation="relu").to(device)
    layer.weight.requires_grad_(False)
    x = torch.randn(3, 6, device=device)
    layer(x).sum().backward()  # the gradient that arrives is an expanded scalar
    assert layer.weight.grad is None
    assert layer.bias.grad is not None
    assert x.grad is None
    with torch.no_grad():
        assert not layer(x).requires_grad


def test_negative_views_come_in_and_go_back_as_their_values(device):
    """Complex numbers before and after a layer: their conjugates' imaginary parts lie in memory with the other sign."""
    weight = torch.randn(4, 6)
    linear, sparse = nn.Linear(6, 4, bias=False).to(device), sparse_layers(weight, None, None, device)[0]
    weight = weight.to(device)
    linear.weight.data.copy_(weight)
    x = torch.randn(3, 6, dtype=torch.complex64, device=device).conj().imag
    factor = torch.randn(3, 4, dtype=torch.complex64, device=device)
    assert x.is_neg()
    for layer in (linear, sparse):
        plain, negative = (a.requires_grad_() for a in (x.resolve_neg(), x.detach()))
        assert negative.is_neg()
        for value in (plain, negative):
            y = layer(value)
            assert error(y, x @ weight.t()) < 1e-6
            (torch.complex(torch.zeros_like(y), y).conj() * factor).real.sum().backward()  # as a negative view
            assert error(value.grad, factor.imag @ weight) < 1e-6


def test_linear_starts_as_pytorch_s():
    torch.manual_seed(4)
    layer = nn.Linear(9, 5)
    torch.manual_seed(4)
    assert torch.equal(layer.weight, torch.nn.Linear(9, 5).weight)


def test_linear_refuses_another_dtype(device):
    with pytest.raises((TypeError, RuntimeError), match=r"dtype|w must be float16, got float32"):
        nn.Linear(6, 4).to(device)(torch.randn(3, 6, device=device, dtype=torch.float16))


# --- the loss -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("m", [1, 64, 257])
def test_case_25_cross_entropy_is_the_mean(device, dtype, m):
    logits = (3 * torch.randn(m, 10)).to(device, dtype).requires_grad_()
    labels = torch.randint(0, 10, (m,), device=device)
    loss = nn.cross_entropy(logits, labels)
    (2.5 * loss).backward()
    peer = logits.detach().cpu().double().requires_grad_()
    peer_loss = functional.cross_entropy(peer, labels.cpu())
    (2.5 * peer_loss).backward()
    assert error(loss, peer_loss) < 2e-6
    assert logits.grad.dtype == dtype
    assert error(logits.grad, peer.grad) < TOLERANCE[dtype]


def test_gradients_of_a_small_net_against_finite_differences(device):
    """Our float32 gradients against central differences of the same net in NumPy's float64."""
    layers = [nn.Linear(5, 7, activation="relu").to(device), nn.Linear(7, 4).to(device)]
    x, labels = torch.randn(9, 5), torch.randint(0, 4, (9,))
    nn.cross_entropy(layers[1](layers[0](x.to(device))), labels.to(device)).backward()
    parameters = [parameter for layer in layers for parameter in (layer.weight, layer.bias)]
    values = [parameter.detach().cpu().double().numpy() for parameter in parameters]

    def loss() -> float:
        w1, b1, w2, b2 = values
        logits = np.maximum(x.double().numpy() @ w1.T + b1, 0) @ w2.T + b2
        log_sum = np.log(np.exp(logits).sum(axis=1))
        return float((log_sum - logits[np.arange(9), labels.numpy()]).mean())

    step = 1e-6
    for parameter, value in zip(parameters, values, strict=True):
        differences = np.zeros_like(value)
        for at in np.ndindex(value.shape):
            middle = value[at]
            value[at] = middle + step
            above = loss()
            value[at] = middle - step
            differences[at] = (above - loss()) / (2 * step)
            value[at] = middle
        assert np.abs(differences).max() > 1e-3
        assert error(parameter.grad, torch.from_numpy(differences)) < 1e-5


# --- QuantLinear ----------------------------------------------------------------------------------------------------


def quantized(device, out_features=33, in_features=784, **options) -> tuple[nn.Linear, nn.QuantLinear]:
    linear = nn.Linear(in_features, out_features, **options)
    return linear, nn.QuantLinear.from_linear(linear).to(device)


@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("size", [(10, 784), (33, 783), (5, 1)], ids=str)
@pytest.mark.parametrize("m", [0, 1, 8, 16, 17, 100])
def test_cases_1_to_3_and_24b_quant_linear_has_the_oracles_bits(device, activation, bias, size, m):
    linear, layer = quantized(device, *size, activation=activation, bias=bias)
    x = torch.randn(m, size[1])
    y = layer(x.to(device))
    w, scale_w = quantize_oracle(linear.weight.detach().numpy())
    q, scale_x = quantize_oracle(x.numpy())
    b = linear.bias.detach().numpy() if bias else None
    expected = int8_oracle(q, w, scale_x, scale_w, b, relu=activation == "relu")
    assert y.dtype == torch.float32
    assert torch.equal(layer.weight.cpu(), torch.from_numpy(w))
    assert torch.equal(y.cpu(), torch.from_numpy(expected))
    if m >= 16 and size[1] > 1:
        assert error(y, linear(x)) < 0.02


def test_quant_linear_takes_any_rank_and_half_inputs(device):
    _, layer = quantized(device, 10, 20)
    x = torch.randn(2, 3, 20, device=device)
    assert torch.equal(layer(x), layer(x.reshape(6, 20)).reshape(2, 3, 10))
    assert torch.equal(layer(x[0, 0]), layer(x[0, :1])[0])
    assert layer(x[:0]).shape == (0, 3, 10)
    for dtype in (torch.float16, torch.bfloat16):
        assert torch.equal(layer(x.to(dtype)), layer(x.to(dtype).float()))


def test_case_6_an_all_zero_output_channel(device):
    linear = nn.Linear(20, 4, bias=False)
    with torch.no_grad():
        linear.weight[1] = 0
    layer = nn.QuantLinear.from_linear(linear).to(device)
    y = layer(torch.randn(5, 20, device=device))
    assert (y[:, 1] == 0).all()
    assert y.isfinite().all()
    assert layer.weight_scale[1] == 1
    assert (layer(torch.zeros(5, 20, device=device)) == 0).all()


def test_case_9_nan_in_one_row(device):
    _, layer = quantized(device, 10, 20, activation="relu")
    x = torch.randn(5, 20, device=device)
    clean = layer(x)
    x[3, 7] = float("nan")
    y = layer(x)
    assert y[3].isnan().all()
    assert torch.equal(y[[0, 1, 2, 4]], clean[[0, 1, 2, 4]])


def test_quantizing_leaves_the_dense_layer_alone():
    linear = nn.Linear(20, 4)
    before = {name: value.clone() for name, value in linear.state_dict().items()}
    layer = nn.QuantLinear.from_linear(linear)
    with torch.no_grad():
        layer.bias += 1
        layer.weight += 1
    for name, value in linear.state_dict().items():
        assert torch.equal(value, before[name])
    assert not list(layer.parameters())


def test_quantizing_a_transposed_weight_stores_it_row_major():
    linear = nn.Linear(20, 4)
    linear.weight = torch.nn.Parameter(linear.weight.detach().t().contiguous().t())
    assert nn.QuantLinear.from_linear(linear).weight.is_contiguous()


# --- WeightOnlyLinear -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize(("bits", "group", "rounding"), [(8, None, 0.01), (8, 64, 0.01), (4, None, 0.2), (4, 96, 0.15)])
def test_weight_only_linear_equals_the_oracle_of_what_it_stores(device, dtype, bits, group, rounding):
    linear = nn.Linear(784, 33, activation="relu")
    layer = nn.WeightOnlyLinear.from_linear(linear, bits, group, dtype).to(device)
    assert layer.weight.dtype == (torch.int8 if bits == 8 else torch.uint8)
    assert layer.weight.shape == (33, 784 * bits // 8)
    assert layer.weight_scale.shape == ((33,) if group is None else (33, -(-784 // group)))
    stored = [value.double().cpu() if value.is_floating_point() else value.cpu() for value in layer.buffers()]
    for shape in ((1, 784), (2, 3, 784), (784,), (0, 784), (300, 784)):
        x = torch.randn(shape).to(dtype)
        y = layer(x.to(device))
        expected = weight_only_oracle(x.reshape(-1, 784).double(), *stored, group=group, relu=True)
        assert y.dtype == dtype
        assert y.shape == (*shape[:-1], 33)
        assert error(y.reshape(-1, 33), torch.from_numpy(expected)) < TOLERANCE[dtype]
        if x.numel() > 784:
            assert error(y, linear(x.float())) < rounding


@pytest.mark.parametrize("bits", [8, 4])
@pytest.mark.parametrize("group", [None, 32])
def test_case_6_weight_only_channels_of_zeros_and_of_extremes(bits, group):
    linear = nn.Linear(70, 4, bias=False)
    with torch.no_grad():
        linear.weight[1] = 0
        linear.weight[2] = 1e-45
        linear.weight[3] = torch.linspace(-3, 3, 70)
    layer = nn.WeightOnlyLinear.from_linear(linear, bits, group, torch.float32)
    assert (layer.weight_scale[1:3] == 1).all()
    assert (layer(torch.randn(5, 70))[:, 1:3] == 0).all()
    limit = 2 ** (bits - 1) - 1
    assert float(layer.weight_scale[3].max()) == np.float32(3) / np.float32(limit)
    inputs = torch.eye(70)[[0, 69]]
    torch.testing.assert_close(layer(inputs)[:, 3], torch.tensor([-3.0, 3.0]))


def test_weight_only_linear_leaves_the_dense_layer_alone():
    linear = nn.Linear(20, 4)
    before = {name: value.clone() for name, value in linear.state_dict().items()}
    layer = nn.WeightOnlyLinear.from_linear(linear, dtype=torch.float32)
    with torch.no_grad():
        layer.bias += 1
        layer.weight += 1
    for name, value in linear.state_dict().items():
        assert torch.equal(value, before[name])
    assert not list(layer.parameters())


# --- SparseLinear ---------------------------------------------------------------------------------------------------


def sparse_layers(weight, bias, activation, device) -> list[nn.SparseLinear]:
    """The same layer from CSR, from sorted COO, and from shuffled COO."""
    rows, cols = weight.nonzero(as_tuple=True)
    counts = torch.bincount(rows, minlength=len(weight))
    offsets = torch.cat((torch.zeros(1, dtype=torch.int64), counts.cumsum(0))).int()
    values, rows, cols = weight[rows, cols], rows.int(), cols.int()
    options = {
        "shape": tuple(weight.shape),
        "bias": None if bias is None else bias.to(device),
        "activation": activation,
    }
    order = torch.randperm(len(values))

    def on(*arrays):
        return [array.to(device) for array in arrays]

    return [
        nn.SparseLinear.from_csr(*on(values, cols, offsets), **options),
        nn.SparseLinear.from_coo(*on(values, rows, cols), **options),
        nn.SparseLinear.from_coo(*on(values[order], rows[order], cols[order]), **options),
    ]


@pytest.mark.parametrize("dtype", TOLERANCE)
@pytest.mark.parametrize("activation", [None, "relu"])
@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("shape", [(1, 50), (100, 50), (2, 3, 50), (50,), (0, 50), (2, 0, 50)], ids=str)
def test_case_16_sparse_linear_equals_the_dense_product(device, dtype, activation, bias, shape):
    weight = torch.where(torch.rand(33, 50) < 0.2, torch.randn(33, 50), 0).to(dtype)
    offset = torch.randn(33).to(dtype) if bias else None
    x = torch.randn(shape).to(dtype)
    reference = functional.linear(x.double(), weight.double(), offset.double() if bias else None)
    for layer in sparse_layers(weight, offset, activation, device):
        y = layer(x.to(device))
        assert y.dtype == dtype
        assert error(y, reference.relu() if activation else reference) < TOLERANCE[dtype]
        assert layer.nnz == int((weight != 0).sum())


def test_case_13_sparse_linear_without_entries(device):
    for layer in sparse_layers(torch.zeros(4, 6), torch.ones(4), None, device):
        assert torch.equal(layer(torch.randn(3, 6, device=device)), torch.ones(3, 4, device=device))


def test_case_15_bad_indices_are_refused_when_set_and_when_loaded(device):
    csr, coo, _ = sparse_layers(torch.eye(4), None, None, device)
    for layer, name in ((csr, "col_indices"), (coo, "cols"), (coo, "rows")):
        state = {key: value.clone() for key, value in layer.state_dict().items()}
        state[name][-1] = 4
        empty = nn.from_description(layer.describe()).to(device)
        with pytest.raises(ValueError, match=rf"^{name}\[3\] is 4, outside \[0, 4\)"):
            empty.load_state_dict(state)
    state = {key: value.clone() for key, value in csr.state_dict().items()}
    state["row_offsets"][2] = 0
    with pytest.raises(ValueError, match=r"^row_offsets\[2\] is 0, below row_offsets\[1\]"):
        nn.from_description(csr.describe()).to(device).load_state_dict(state)
    state = {key: value.clone() for key, value in coo.state_dict().items()}
    state["rows"] = state["rows"].flip(0)
    with pytest.raises(ValueError, match=r"^rows must ascend"):
        nn.from_description(coo.describe()).to(device).load_state_dict(state)
    values, rows = coo.values, coo.rows
    with pytest.raises(ValueError, match=r"^cols\[0\] is -1, outside \[0, 4\)"):
        nn.SparseLinear.from_coo(values, rows, rows - 1, shape=(4, 4))
    with pytest.raises(ValueError, match=r"^row_offsets must go from 0 to nnz = 4, got 0 to 3"):
        nn.SparseLinear.from_csr(values, rows, csr.row_offsets.clamp(max=3), shape=(4, 4))


@pytest.mark.parametrize("kind", ["csr", "coo", "int8"])
def test_a_pattern_outlives_a_load_of_the_same(kind, device):
    """A captured CUDA graph reads what the layer found out about its pattern: the same pattern must not let it go."""
    weight = torch.where(torch.rand(33, 50) < 0.2, torch.randn(33, 50), 0)
    csr, coo, _ = sparse_layers(weight, None, None, device)
    scale = torch.ones(33, device=device)
    arrays = torch.ones(csr.nnz, dtype=torch.int8, device=device), csr.col_indices, csr.row_offsets
    int8 = nn.QuantSparseLinear.from_integers(*arrays, scale, shape=(33, 50))
    layer = {"csr": csr, "coo": coo, "int8": int8}[kind]
    pattern, x = layer.pattern(), torch.randn(20, 50, device=device)
    kept = [getattr(pattern.transposed, name).data_ptr() for name in ("order", "cols", "offsets")]
    plan, offsets = pattern.plan, pattern.offsets.data_ptr()
    state = {name: value.cpu().clone() for name, value in layer.state_dict().items()}
    state["values"] *= 2
    y = layer(x)
    layer.load_state_dict(state)
    assert layer.pattern() is pattern
    assert pattern.plan is plan
    assert pattern.offsets.data_ptr() == offsets
    assert [getattr(pattern.transposed, name).data_ptr() for name in ("order", "cols", "offsets")] == kept
    torch.testing.assert_close(layer(x), 2 * y)

    name = "cols" if kind == "coo" else "col_indices"
    state[name] = (49 - state[name].int()).to(state[name].dtype)
    layer.load_state_dict(state)
    assert layer.pattern() is not pattern
    torch.testing.assert_close(layer(x.flip(1)), 2 * y)
    other = layer.pattern()
    layer.load_state_dict(state, assign=True)
    assert layer.pattern() is not other


# --- every layer ----------------------------------------------------------------------------------------------------


def every_layer() -> list[torch.nn.Module]:
    linear = nn.Linear(6, 4, activation="relu")
    weight = torch.eye(4, 6)
    return [
        linear,
        nn.Linear(6, 4, bias=False, dtype=torch.bfloat16),
        nn.QuantLinear.from_linear(linear),
        nn.QuantLinear.from_linear(nn.Linear(6, 4, bias=False)),
        nn.WeightOnlyLinear.from_linear(linear),
        nn.WeightOnlyLinear.from_linear(nn.Linear(6, 4, bias=False), bits=4, group=4, dtype=torch.bfloat16),
        *sparse_layers(weight, torch.randn(4), "relu", "cpu"),
        *sparse_layers(weight.half(), None, None, "cpu"),
    ]


@pytest.mark.parametrize("index", range(len(every_layer())))
def test_a_layer_comes_back_from_its_description_and_its_state(index):
    layer = every_layer()[index]
    description = json.loads(json.dumps(layer.describe()))
    empty = nn.from_description(description)
    assert type(empty) is type(layer)
    assert empty.describe() == description
    assert (empty.in_features, empty.out_features, empty.activation) == (6, 4, layer.activation)
    empty.load_state_dict(layer.state_dict(), strict=True)
    dtypes = {nn.SparseLinear: lambda: layer.values.dtype, nn.WeightOnlyLinear: lambda: layer.dtype}
    dtype = dtypes.get(type(layer), lambda: layer.weight.dtype)()
    x = torch.randn(5, 6).to(dtype if dtype.is_floating_point else torch.float32)
    with torch.no_grad():
        assert torch.equal(empty(x), layer(x))


def test_kernel_names_what_runs():
    names = [layer.cpu_kernel() for layer in every_layer()]
    assert names[0] == "gemm:cpu"
    assert names[2] in ("gemm_int8:cpu (torch._int_mm)", "gemm_int8:cpu (float32 slices)")
    assert names[4] == "gemm_weight_only:cpu"
    assert names[6:8] == ["spmm_csr:cpu", "spmm_coo:cpu"]


def test_what_cannot_be_is_refused():
    for make in (
        lambda: nn.Linear(3, 4, activation="gelu"),
        lambda: nn.QuantLinear(3, 4, activation="gelu"),
        lambda: nn.SparseLinear(3, 4, 0, activation="gelu"),
        lambda: nn.WeightOnlyLinear(3, 4, activation="gelu"),
    ):
        with pytest.raises(ValueError, match=r'^activation must be None or "relu", got \'gelu\''):
            make()
    with pytest.raises(ValueError, match=r"^format must be one of csr, coo, got 'csc'"):
        nn.SparseLinear(3, 4, 0, "csc")
    with pytest.raises(ValueError, match=r"^bits must be 4 or 8, got 3"):
        nn.WeightOnlyLinear.from_linear(nn.Linear(3, 4), 3)
    with pytest.raises(ValueError, match=r"^group must be at least 1, got 0"):
        nn.WeightOnlyLinear(3, 4, group=0)
    with pytest.raises(ValueError, match=r"^unknown kind of layer 'Conv'; known are Linear, .*WeightOnlyLinear"):
        nn.from_description({"kind": "Conv"})


SIZED = {
    nn.Linear: {"in_features": 4, "out_features": 3},
    nn.QuantLinear: {"in_features": 4, "out_features": 3},
    nn.ZeroPointLinear: {"in_features": 4, "out_features": 3},
    nn.Fp8Linear: {"in_features": 4, "out_features": 3},
    nn.WeightOnlyLinear: {"in_features": 4, "out_features": 3, "group": 2},
    nn.SparseLinear: {"in_features": 4, "out_features": 3, "nnz": 2},
    nn.QuantSparseLinear: {"in_features": 4, "out_features": 3, "nnz": 2},
    nn.TwoFourLinear: {"in_features": 4, "out_features": 3},
    nn.QuantTwoFourLinear: {"in_features": 4, "out_features": 3},
    nn.BitmapLinear: {"in_features": 4, "out_features": 3, "values": 8},
    nn.EntryLinear: {"in_features": 4, "out_features": 3, "entries": 8},
}


@pytest.mark.parametrize("kind", SIZED, ids=lambda kind: kind.__name__)
def test_sizes_that_are_none_are_named(kind):
    assert set(SIZED) == {each for name, each in vars(nn).items() if name in nn.__all__ and isinstance(each, type)}
    kind(**{name: np.int64(size) for name, size in SIZED[kind].items()})
    for name in SIZED[kind]:
        for size in ("4", 4.0, None, [4], True):
            if (name, size) != ("group", None):
                with pytest.raises(TypeError, match=rf"^{name} must be an int, "):
                    kind(**{**SIZED[kind], name: size})
        with pytest.raises(ValueError, match=rf"^{name} must be at least [01], got -1"):
            kind(**{**SIZED[kind], name: -1})


ONES = torch.ones(1, 8)


@pytest.mark.parametrize(
    ("make", "name"),
    [
        (lambda a: nn.QuantLinear.from_integers(a, ONES), "weight"),
        (lambda a: nn.QuantLinear.from_integers(ONES, a), "weight_scale"),
        (lambda a: nn.ZeroPointLinear.from_integers(a, ONES), "weight"),
        (lambda a: nn.WeightOnlyLinear.from_integers(ONES, a), "scale"),
        (lambda a: nn.Fp8Linear.from_numbers(a, ONES), "q"),
        (lambda a: nn.SparseLinear.from_csr(a, ONES, ONES, shape=(1, 8)), "values"),
        (lambda a: nn.SparseLinear.from_coo(ONES, ONES, a, shape=(1, 8)), "cols"),
        (lambda a: nn.QuantSparseLinear.from_integers(ONES, a, ONES, ONES, shape=(1, 8)), "col_indices"),
        (lambda a: nn.TwoFourLinear.from_24(ONES, a, shape=(1, 8)), "metadata"),
        (lambda a: nn.QuantTwoFourLinear.from_integers(ONES, ONES, a, shape=(1, 8)), "weight_scale"),
        (lambda a: nn.BitmapLinear.from_tiles(a, ONES, ONES, shape=(1, 8)), "values"),
        (lambda a: nn.EntryLinear.from_tiles(a, ONES, shape=(1, 8), dtype=torch.float16), "entries"),
    ],
)
def test_a_layer_of_what_is_no_tensor_is_refused(make, name):
    with pytest.raises(TypeError, match=rf"^{name} must be a torch.Tensor, not list$"):
        make([[1.0]])


def test_no_call_copies_what_a_sparse_layer_stores():
    w = torch.randn(8, 16).half()
    entries, offsets = to_entry_tiles(w, w > 0)
    strided = torch.stack((entries, entries), 1)[:, 0]
    for given in (strided, torch.nn.functional.pad(entries, (1, 0))[1:]):
        layer = nn.EntryLinear.from_tiles(given, offsets, shape=(8, 16), dtype=torch.float16)
        assert torch.equal(layer.tiles, entries)
        assert layer.tiles.is_contiguous()
        assert layer.tiles.data_ptr() % 16 == 0
        assert layer.offsets is offsets
    layer.load_state_dict({"tiles": strided, "offsets": offsets}, assign=True)
    assert layer.tiles.is_contiguous()
