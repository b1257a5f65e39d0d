"""The multilayer perceptron: its start, its inputs, its copies, and its description."""

from __future__ import annotations

import copy
import json

import pytest
import torch

from qsparse import models, nn, quantize, sparsify
from qsparse.data import normalize
from qsparse.sparse import SparseConfig


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.gpu)])
def device(request) -> torch.device:
    return torch.device(request.param, 0 if request.param == "cuda" else None)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (20, 784), generator=torch.Generator().manual_seed(40), dtype=torch.uint8)


def sparse_layer(linear: nn.Linear, density: float = 0.2) -> nn.SparseLinear:
    weight = linear.weight.detach()
    weight = torch.where(weight.abs() >= weight.abs().quantile(1 - density), weight, 0)
    csr = weight.to_sparse_coo().coalesce()
    rows, cols = csr.indices().int()
    bias = linear.bias.detach()
    return nn.SparseLinear.from_coo(csr.values(), rows, cols, shape=weight.shape, bias=bias, activation="relu")


def mixed_model() -> models.MLP:
    """One layer of each kind and dtype."""
    model = models.MLP((784, 40, 30, 20, 10))
    layers = model.layers()
    return model.replace(
        {
            "fc1": nn.QuantLinear.from_linear(layers["fc1"]),
            "fc2": sparse_layer(layers["fc2"]),
            "fc3": copy.deepcopy(layers["fc3"]).to(torch.bfloat16),
            "fc4": nn.WeightOnlyLinear.from_linear(layers["fc4"]),
        }
    )


@pytest.mark.parametrize("format", ["csr", "coo", "2:4", "bitmap", "entries"])
def test_a_pass_never_counts_what_a_sparse_layer_keeps(format, images, monkeypatch):
    """To count waits for a GPU: slow, and fatal while a CUDA graph captures."""
    model = sparsify(models.MLP((784, 16, 10)), SparseConfig(pattern="2:4", format=format))
    expected = model(images)

    def count(layer):
        raise AssertionError("the weights that stay were counted")

    for layer in model.layers().values():
        monkeypatch.setattr(type(layer), "nnz", property(count))
    assert torch.equal(model(images), expected)
    assert model.input_dtype == (model.fc1 if format == "entries" else model.fc1.values).dtype


def test_layers_and_sizes():
    model = models.MLP((784, 256, 100, 10))
    assert model.sizes == (784, 256, 100, 10)
    assert list(model.layers()) == ["fc1", "fc2", "fc3"]
    assert [layer.activation for layer in model.layers().values()] == ["relu", "relu", None]
    assert list(model.state_dict()) == [f"fc{i}.{part}" for i in (1, 2, 3) for part in ("weight", "bias")]
    assert models.MLP([784, 10]).sizes == (784, 10)


def test_more_than_nine_layers_stay_in_order():
    sizes = tuple(range(12, 0, -1))
    model = models.MLP(sizes)
    assert model.sizes == sizes
    assert models.from_description(model.describe()).sizes == sizes


def test_the_seed_decides_the_weights_and_nothing_else_moves():
    before = torch.get_rng_state()
    first, again, other = (
        models.MLP((784, 16, 10), seed=3),
        models.MLP((784, 16, 10), seed=3),
        models.MLP((784, 16, 10)),
    )
    assert torch.equal(torch.get_rng_state(), before)
    for name, value in first.state_dict().items():
        assert torch.equal(value, again.state_dict()[name])
        assert not torch.equal(value, other.state_dict()[name])
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(3)
        peer = [torch.nn.Linear(784, 16), torch.nn.Linear(16, 10)]
    for layer, peer_layer in zip(first.layers().values(), peer, strict=True):
        assert torch.equal(layer.weight, peer_layer.weight)
        assert torch.equal(layer.bias, peer_layer.bias)


@pytest.mark.parametrize("sizes", [(), (784,), (784, 0, 10), (784, -1)], ids=str)
def test_sizes_that_cannot_be(sizes):
    with pytest.raises(ValueError, match=r"^sizes must be at least two positive widths, got"):
        models.MLP(sizes)


@pytest.mark.parametrize("sizes", [None, 5, "784", (784, "10"), (784, 1.5)], ids=str)
def test_sizes_that_are_none(sizes):
    with pytest.raises(TypeError, match=r"^sizes must be a sequence of integers, got"):
        models.MLP(sizes)


@pytest.mark.parametrize(
    "compress", [lambda m: m, lambda m: quantize(m, "int8"), lambda m: sparsify(m, SparseConfig(0.5))]
)
def test_images_that_are_none_are_named(compress):
    model = compress(models.MLP((784, 32, 10)))
    for x in (torch.zeros(2, 28, 28), torch.zeros(2, 783), torch.tensor(1.0)):
        with pytest.raises(ValueError, match=r"^x must have shape \(M, 784\), got"):
            model(x)
    with pytest.raises(TypeError, match=r"^x must be a torch\.Tensor, got ndarray"):
        model(torch.zeros(2, 784).numpy())


@pytest.mark.parametrize("model", [None, torch.nn.Linear(3, 2)], ids=str)
def test_a_model_of_another_kind_is_named(model):
    for call in (lambda: quantize(model, "int8"), lambda: sparsify(model, SparseConfig(0.5))):
        with pytest.raises(TypeError, match=r"^model must be a qsparse\.models\.MLP"):
            call()


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_pixels_and_normalised_floats_are_the_same_input(device, dtype, images):
    model = models.MLP((784, 32, 10)).to(device, dtype)
    images = images.to(device)
    with torch.no_grad():
        logits = model(images)
        assert torch.equal(logits, model(normalize(images, dtype)))
        assert torch.equal(logits, model(normalize(images, dtype).double()))
    assert logits.dtype == torch.float32
    assert logits.shape == (20, 10)
    assert model.input_dtype == dtype
    reference = normalize(images.cpu(), torch.float64)
    for layer in model.layers().values():
        reference = reference @ layer.weight.cpu().double().t() + layer.bias.cpu().double()
        reference = reference.relu() if layer.activation else reference
    tolerance = {torch.float32: 1e-5, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype]
    assert (logits.cpu() - reference).norm() / reference.norm() < tolerance


def test_case_5_no_images(device):
    for model in (models.MLP((784, 32, 10)), mixed_model()):
        assert model.to(device)(torch.zeros(0, 784, dtype=torch.uint8, device=device)).shape == (0, 10)


def test_a_mixed_model_runs_on_every_device(device, images):
    model = mixed_model()
    with torch.no_grad():
        logits = model.to(device)(images.to(device))
        reference = mixed_model_reference(images)
    assert logits.dtype == torch.float32
    assert (logits.cpu() - reference).norm() / reference.norm() < 0.05


@pytest.mark.parametrize("static", [False, True])
@pytest.mark.parametrize("sizes", [(784, 10), (784, 256, 10), (784, 33, 20, 30, 40, 10)], ids=str)
def test_an_int8_network_is_its_layers_one_after_the_other(device, sizes, static, images):
    model = models.MLP(sizes)
    layers = {name: nn.QuantLinear.from_linear(layer) for name, layer in model.layers().items()}
    if static:
        layers["fc1"].input_scale = torch.full((1,), 0.02)
    model = model.replace(layers).to(device)
    images = images.to(device)
    inputs = [images, *(normalize(images, dtype) for dtype in (torch.float32, torch.float16, torch.float64))]
    for x in [*inputs, inputs[1][:1], inputs[1].view(4, 5, 784)]:
        logits = model(x)
        y = normalize(x) if x.dtype == torch.uint8 else x.float()
        for layer in model.layers().values():
            y = layer(y)
        assert torch.equal(logits, y)
        seen = []
        handle = model.fc1.register_forward_hook(lambda *arguments, seen=seen: seen.append(arguments))
        assert torch.equal(model(x), logits)
        assert len(seen) == 1
        handle.remove()


@pytest.mark.parametrize("part", ["weight_scale", "bias"])
def test_a_static_int8_network_keeps_the_nan_of_a_hidden_layer(device, part, images):
    model = models.MLP((784, 24, 10))
    layers = {name: nn.QuantLinear.from_linear(layer) for name, layer in model.layers().items()}
    layers["fc2"].input_scale = torch.full((1,), 0.02)
    model = model.replace(layers).to(device)
    images = images.to(device)
    assert model(images).isfinite().all()
    getattr(model.fc1, part)[5] = torch.nan
    assert model(images).isnan().all()
    getattr(model.fc1, part)[5] = 0
    assert model(images).isfinite().all()


@pytest.mark.parametrize("format", ["csr", "coo", "2:4", "bitmap", "entries"])
def test_sparse_networks_can_be_pickled(format, tmp_path):
    density = None if format == "2:4" else 0.3
    model = sparsify(models.MLP((64, 32, 10), seed=3), SparseConfig(density=density, format=format))
    torch.save(model, tmp_path / "model.pt")
    again = torch.load(tmp_path / "model.pt", weights_only=False)
    images = torch.randint(0, 256, (3, 64), dtype=torch.uint8, generator=torch.Generator().manual_seed(1))
    assert torch.equal(again(images), model(images))
    again.load_state_dict(model.state_dict())
    assert torch.equal(again(images), model(images))


def int8_first(model: models.MLP) -> models.MLP:
    """With a first layer that gives float32, and lets the next kernel start at once."""
    return model.replace({"fc1": nn.QuantLinear.from_linear(models.MLP(model.sizes).fc1)})


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sizes", "rows", "format", "dtype", "int8"),
    [
        ((784, 1024, 1024, 10), 10_000, "csr", None, True),
        ((784, 1024, 1024, 10), 10_000, "csr", None, False),
        ((784, 256, 256, 10), 60_000, "csr", None, True),
        ((784, 256, 256, 10), 60_000, "csr", None, False),
        ((784, 1024, 1024, 10), 64, "csr", None, True),
        ((784, 1024, 1024, 10), 1, "csr", "fp16", False),
        ((784, 1024, 1024, 10), 16, "csr", "fp16", False),
        ((784, 1024, 1024, 10), 64, "csr", "fp16", False),
        ((784, 1024, 1024, 10), 1, "entries", None, False),
        ((784, 1024, 1024, 10), 16, "entries", None, False),
        ((784, 1024, 1024, 10), 64, "entries", None, False),
    ],
    ids=str,
)
def test_layers_that_start_early_wait_for_what_they_read(sizes, rows, format, dtype, int8):
    """In a network a layer's kernels may be in place before the one before it has ended: never a bit of a difference.

    Two batches take turns, in calls and in replays of a CUDA graph: what is read too early is of the other one.
    """
    model = sparsify(models.MLP(sizes), SparseConfig(density=0.1, distribution="uniform", format=format, dtype=dtype))
    model = (int8_first(model) if int8 else model).cuda()
    generator = torch.Generator("cuda").manual_seed(41)
    batches = [
        torch.randint(0, 256, (rows, sizes[0]), generator=generator, device="cuda", dtype=torch.uint8) for _ in range(2)
    ]

    def one_by_one(x):
        x = normalize(x, model.input_dtype)
        for layer in model.children():
            x = layer(x.to(models.input_dtype_of(layer)))
            torch.cuda.synchronize()
        return x.float()

    with torch.no_grad():
        expected = [one_by_one(batch) for batch in batches]
        assert not torch.equal(*expected)
        for turn in range(6):
            assert torch.equal(model(batches[turn % 2]), expected[turn % 2])
        x, graph = batches[0].clone(), torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            y = model(x)
        for turn in range(20):
            x.copy_(batches[turn % 2])
            graph.replay()
            assert torch.equal(y, expected[turn % 2])


def mixed_model_reference(images):
    """The same weights, dense and in float32."""
    model = mixed_model()
    x = normalize(images)
    for layer in model.layers().values():
        if isinstance(layer, (nn.QuantLinear, nn.WeightOnlyLinear)):
            weight = layer.weight * layer.weight_scale[:, None]
        elif isinstance(layer, nn.SparseLinear):
            weight = torch.zeros(layer.out_features, layer.in_features)
            weight[layer.rows.long(), layer.cols.long()] = layer.values
        else:
            weight = layer.weight.float()
        x = x @ weight.t() + layer.bias.float()
        x = x.relu() if layer.activation else x
    return x


def test_replace_shares_nothing(images):
    model = models.MLP((784, 16, 10))
    layer = nn.QuantLinear.from_linear(model.fc1)
    other = model.replace({"fc1": layer})
    assert isinstance(other.fc1, nn.QuantLinear)
    assert isinstance(model.fc1, nn.Linear)
    before = {name: value.clone() for name, value in model.state_dict().items()}
    with torch.no_grad():
        for value in other.state_dict().values():
            value.zero_()
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert (layer.weight != 0).any()
    assert other.fc1 is not layer
    with pytest.raises(ValueError, match=r"^no layer named fc3; there are fc1, fc2"):
        model.replace({"fc3": layer})


def test_a_model_comes_back_from_its_description_and_its_state(images):
    for model in (models.MLP((784, 16, 10), seed=1), mixed_model()):
        description = json.loads(json.dumps(model.describe()))
        assert description["sizes"] == list(model.sizes)
        empty = models.from_description(description)
        assert empty.describe() == description
        empty.load_state_dict(model.state_dict(), strict=True)
        with torch.no_grad():
            assert torch.equal(empty(images), model(images))


def test_kernel_says_what_runs():
    assert models.MLP((784, 16, 10)).cpu_kernel() == "gemm:cpu"
    kernel = mixed_model().cpu_kernel()
    assert kernel.startswith("gemm_int8:cpu (")
    assert kernel.endswith("), spmm_coo:cpu, gemm:cpu, gemm_weight_only:cpu")


def test_gradients_reach_every_parameter(device, images):
    model = models.MLP((784, 16, 10)).to(device)
    labels = torch.arange(20, device=device) % 10
    nn.cross_entropy(model(images.to(device)), labels).backward()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.isfinite().all()
        assert (parameter.grad != 0).any()
