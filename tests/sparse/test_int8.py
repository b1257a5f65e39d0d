"""int8 in CSR and 2:4: the bits of the dense int8 layer, both orders, what a row says and what is refused."""

import functools
import json

import pytest
import torch
from typer.testing import CliRunner

import qsparse
from qsparse import checkpoint, cli, data, nn, sparse, variants
from qsparse.errors import UserError
from qsparse.measure import measure
from qsparse.models import MLP
from qsparse.sparse import SparseConfig
from qsparse.sparse.int8 import prune_jointly
from qsparse.sparse.masks import largest_of_each_group
from qsparse.sparse.sparsegpt import sparsegpt
from qsparse.sparse.store import store
from qsparse.train.config import TrainConfig
from qsparse.train.fit import evaluate, fit
from qsparse.train.run import train

SIZES = (784, 24, 10)
TOTAL = 784 * 24 + 24 * 10


@pytest.fixture(scope="module")
def digits():
    return data.load("mnist-5k")


@pytest.fixture(scope="module")
def trained(digits):
    model = MLP(SIZES)
    fit(model, digits, TrainConfig(epochs=3))
    return model


def to_dense(layer: nn.QuantSparseLinear) -> torch.Tensor:
    shape = (layer.out_features, layer.in_features)
    return sparse.from_csr(layer.values, layer.col_indices.int(), layer.row_offsets, shape)


def layer_of(n, k, density, bias=True, seed=0):
    """A sparse int8 layer with all kinds of rows: an empty one, and one at the ends of the range."""
    torch.manual_seed(seed)
    q = torch.randint(-127, 128, (n, k), dtype=torch.int8)
    mask = torch.rand(n, k) < density
    mask[0] = False
    q[-1] = 127
    offset = torch.randn(n) if bias else None
    scale = torch.rand(n) + 0.01
    layer = nn.QuantSparseLinear.from_integers(*sparse.to_csr(q, mask), scale, shape=(n, k), bias=offset)
    return layer, nn.QuantLinear.from_integers(torch.where(mask, q, 0), scale, offset)


@pytest.mark.parametrize("shape", [(1, 50), (37, 50), (2, 3, 50), (0, 50), (50,)], ids=str)
@pytest.mark.parametrize("density", [0.0, 0.2, 1.0])
@pytest.mark.parametrize("bias", [True, False])
def test_the_bits_are_those_of_the_dense_int8_layer(shape, density, bias):
    layer, dense = layer_of(33, 50, density, bias)
    x = torch.randn(shape)
    assert torch.equal(layer(x), dense(x))
    layer.activation = dense.activation = "relu"
    assert torch.equal(layer(x.bfloat16()), dense(x.bfloat16()))


def test_a_long_row_is_exact_to_1040_entries_and_rounded_beyond():
    for k, exact in ((1040, True), (4096, False)):
        layer, dense = layer_of(5, k, 1.0)
        x = 1 - torch.rand(8, k) / 100  # quantizes to about 127
        assert torch.equal(layer(x), dense(x)) or not exact
        torch.testing.assert_close(layer(x), dense(x), rtol=1e-4, atol=1e-4)


def test_nan_stays_in_its_row():
    layer, _ = layer_of(6, 20, 0.5)
    x = torch.randn(3, 20)
    clean = layer(x)
    x[1, 4] = torch.nan
    y = layer(x)
    assert y[1].isnan().all()
    assert torch.equal(y[[0, 2]], clean[[0, 2]])


def test_bytes_are_one_a_value_and_two_a_column():
    layer, _ = layer_of(30, 100, 0.3)
    stored = {name: tensor.dtype for name, tensor in layer.state_dict().items()}
    assert stored == {"values": torch.int8, "col_indices": torch.uint16, "row_offsets": torch.int32,
                      "weight_scale": torch.float32, "bias": torch.float32}  # fmt: skip
    assert nn.QuantSparseLinear(65_537, 1, 3).col_indices.dtype == torch.int32


def test_a_bad_index_is_refused_when_set_and_when_loaded():
    layer, _ = layer_of(6, 20, 0.5)
    state = {name: tensor.clone() for name, tensor in layer.state_dict().items()}
    state["col_indices"] = torch.full_like(state["col_indices"].int(), 20).to(torch.uint16)
    with pytest.raises(ValueError, match=r"^col_indices\[0\] is 20, outside \[0, 20\)"):
        nn.from_description(layer.describe()).load_state_dict(state)
    with pytest.raises(ValueError, match="row_offsets must go from 0"):
        nn.QuantSparseLinear.from_integers(
            layer.values, layer.col_indices, layer.row_offsets + 1, layer.weight_scale, shape=(6, 20)
        )
    with pytest.raises(TypeError, match="do not train"):
        layer.make_trainable()


def test_prune_first_rounds_what_stays(digits, trained):
    model = qsparse.compress(trained, SparseConfig(0.1))
    _, masks = sparse.prune(trained, SparseConfig(0.1))
    assert sum(layer.nnz for layer in model.layers().values()) == round(0.1 * TOTAL)
    for name, layer in model.layers().items():
        q, kept = to_dense(layer).float(), trained.layers()[name].weight * masks[name]
        assert torch.equal(layer.bias, trained.layers()[name].bias)
        assert ((q * layer.weight_scale[:, None] - kept).abs() <= layer.weight_scale[:, None] * 0.5001).all()
        rows = masks[name].any(dim=1)
        assert (q.abs().amax(dim=1)[rows] == 127).all()
    assert trained.fc1.weight.dtype == torch.float32


def test_joint_keeps_the_outputs_better_than_pruning_and_rounding_apart():
    torch.manual_seed(0)
    w, x = torch.randn(16, 64), torch.randn(256, 64) @ torch.randn(64, 64)
    step = 0.5  # coarse, so that the rounding counts

    def rounded(values):
        return (values / step).round() * step

    joint, mask = sparsegpt(w, x, 960, round=rounded)
    apart, _ = sparsegpt(w, x, 960)
    torch.testing.assert_close(joint, torch.where(mask, rounded(joint), 0.0))
    assert int(mask.sum()) == 960
    errors = [((x @ (each - w).T) ** 2).sum() for each in (joint, torch.where(apart != 0, rounded(apart), 0.0))]
    assert errors[0] < 0.8 * errors[1]


@pytest.mark.parametrize("fields", [{"density": 0.2}, {"pattern": "2:4"}])
def test_joint_lies_on_the_grid_and_its_mask_is_exact(digits, trained, fields):
    config = SparseConfig(**fields, pruner="sparsegpt", samples=256)
    pruned, masks, scales = prune_jointly(trained, config, digits)
    model = sparse.sparsify(pruned, masks, "csr", "int8", scales=scales)
    assert sum(int(mask.sum()) for mask in masks.values()) == round(fields.get("density", 0.5) * TOTAL)
    for name, layer in model.layers().items():
        assert layer.nnz == int(masks[name].sum())
        assert int(layer.values.abs().max()) <= 127
    assert evaluate(model, digits.test)[0] > evaluate(qsparse.compress(trained, SparseConfig(
        **fields, pruner="random"), digits), digits.test)[0] + 0.1  # fmt: skip


def test_joint_names_a_layer_that_it_empties_once(digits, trained):
    with pytest.warns(sparse.EmptyLayerWarning) as given:
        qsparse.compress(trained, SparseConfig(1e-4, "sparsegpt", samples=128), digits, "joint")
    assert ["fc2" in str(one.message) for one in given] == [True]


def test_a_layer_left_with_nothing_still_runs(digits, trained):
    masks = {name: torch.zeros_like(layer.weight, dtype=torch.bool) for name, layer in trained.layers().items()}
    for format in ("csr", "2:4"):
        model = sparse.sparsify(trained, masks, format, "int8")
        assert torch.equal(model(digits.test.images[:3]), trained.fc2.bias.detach().expand(3, 10))


@pytest.mark.parametrize(
    ("config", "order", "message"),
    [
        (SparseConfig(0.1), "joint", "joint is a pass of sparsegpt, which magnitude is not"),
        (SparseConfig(0.1), "quantize-first", "unknown order 'quantize-first': choose one of prune-first, joint"),
        (SparseConfig(0.1, format="coo"), "prune-first", "coo stores fp32 or fp16 or bf16, not 'int8'"),
        (SparseConfig(0.1, dtype="fp16"), "prune-first", "compress rounds to int8, not to fp16"),
    ],
)
def test_what_is_refused(trained, config, order, message):
    with pytest.raises(UserError, match=message):
        qsparse.compress(trained, config, order=order)


def test_the_command_and_its_rows(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))
    run = train(TrainConfig(hidden=(32,), epochs=1, data="mnist-5k", device="cpu")).run
    named = {}
    for more in ((), ("--order", "joint"), ("--finetune-epochs", "1")):
        line = ["compress", str(run), "--dtype", "int8", "--density", "0.1", "--format", "csr", *more]
        result = CliRunner().invoke(cli.app, [*line, "--device", "cpu", "--json"])
        assert result.exit_code == 0, result.stderr
        value = json.loads(result.stdout)
        named[value["variant"]] = value["rows"][1]
        model = checkpoint.load(value["saved"])
        assert named[value["variant"]]["accuracy"] == evaluate(model, data.load("mnist-5k").test)[0]
    assert list(named) == ["int8-csr-0.1", "int8-csr-0.1-sparsegpt-joint", "int8-csr-0.1-ft1"]
    row = named["int8-csr-0.1-sparsegpt-joint"]
    assert (row["dtype"], row["format"], row["order"], row["method"]) == ("int8", "csr", "joint", "sparsegpt")
    assert (row["kernel"], row["computed_in"]) == ("spmm_csr:cpu (int8 as float32)", "float32")
    assert (row["activations"], row["granularity"]) == ("dynamic", "channel")
    kept = round(0.1 * (784 * 32 + 320))
    assert row["density"] == kept / (784 * 32 + 320)
    assert row["weight_bytes"] == 3 * kept + 4 * (33 + 11) + 8 * 42
    for options, said in (
        (("--order", "joint", "--pruner", "wanda"), "joint is a pass of sparsegpt"),
        (("--order", "joint", "--finetune-epochs", "1"), "do not train"),
        (("--format", "coo"), "'2:4'"),
        (("--format", "2:4"), "2:4 stores 2 of each 4 weights, a density of 0.5, not 0.1"),
        (("--pattern", "2:4"), "give one of"),
    ):
        result = CliRunner().invoke(cli.app, ["compress", str(run), "--density", "0.1", *options])
        assert result.exit_code == 2
        assert said in " ".join(result.stderr.replace("│", " ").split())
    with pytest.raises(TypeError, match="config must be a SparseConfig"):
        qsparse.compress(checkpoint.load(run), 0.1)
    with pytest.raises(UserError, match="order joint is of int8"):
        variants.sparsify_run(run, 0.1, order="joint", pruner="sparsegpt")


def pruned_layer(n, k, dtype, bias=True, seed=0):
    """A dense layer that keeps two of each four weights, and its mask."""
    torch.manual_seed(seed)
    layer = nn.Linear(k, n, bias=bias).requires_grad_(False)
    mask = largest_of_each_group(layer.weight.abs(), 2, 4)
    layer.weight *= mask
    return layer.to(dtype), mask


@pytest.mark.parametrize("shape", [(1, 50), (37, 50), (2, 3, 50), (0, 50), (50,), (3, 8), (3, 9), (3, 1)], ids=str)
@pytest.mark.parametrize("bias", [True, False])
def test_2_of_4_in_int8_has_the_bits_of_the_dense_int8_layer(shape, bias):
    layer, mask = pruned_layer(33, shape[-1], torch.float32, bias)
    stored, dense = store("fc1", layer, mask, "2:4", "int8"), nn.QuantLinear.from_linear(layer)
    x = torch.randn(shape)
    x.view(-1)[:1] = torch.nan
    torch.testing.assert_close(stored(x), dense(x), rtol=0, atol=0, equal_nan=True)
    stored.activation = dense.activation = "relu"
    torch.testing.assert_close(stored(x.bfloat16()), dense(x.bfloat16()), rtol=0, atol=0, equal_nan=True)


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(1, 784, 10), (64, 784, 256), (300, 50, 33), (4096, 4096, 10), (2048, 4096, 4096)])
def test_2_of_4_in_int8_has_the_same_bits_on_a_gpu(shape):
    m, k, n = shape
    layer, mask = pruned_layer(n, k, torch.float32)
    stored, dense = store("fc1", layer, mask, "2:4", "int8"), nn.QuantLinear.from_linear(layer)
    x = torch.randn(m, k)
    on_gpu = stored.cuda()(x.cuda())
    assert torch.equal(on_gpu, dense.cuda()(x.cuda()))
    assert torch.equal(on_gpu[:64].cpu(), dense.cpu()(x[:64]))


def test_int8_and_2_of_4_on_the_command_line(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(variants, "measure", functools.partial(measure, budget_s=0.002, batches=(1,)))
    run = train(TrainConfig(hidden=(64,), epochs=1, data="mnist-5k", device="cpu")).run
    for more, variant in (
        (("--density", "0.5"), "int8-2of4"),
        (("--order", "joint"), "int8-2of4-sparsegpt-joint"),
        (("--pattern", "1:4"), "int8-2of4-1of4"),
    ):
        line = ["compress", str(run), "--format", "2:4", *more, "--device", "cpu", "--json"]
        result = CliRunner().invoke(cli.app, line)
        assert result.exit_code == 0, result.stderr
        value = json.loads(result.stdout)
        row = value["rows"][1]
        assert value["variant"] == variant
        assert (row["dtype"], row["format"], row["density"]) == ("int8", "2:4", 0.25 if "1of4" in variant else 0.5)
        assert (row["kernel"], row.get("computed_in"), row["activations"]) == ("gemm_int8_24:cpu", None, "dynamic")
        assert row["weight_bytes"] == 64 * (392 + 98 + 8) + 10 * (32 + 8 + 8)
        assert row["weight_ratio"] < 0.16
        assert row["accuracy"] == evaluate(checkpoint.load(value["saved"]), data.load("mnist-5k").test)[0]
