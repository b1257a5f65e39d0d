"""Run directories, models and rows on disk: what comes back, and what is refused."""

import concurrent.futures
import json
import math
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save, save_file

import qsparse
from qsparse import checkpoint, quant, sparse
from qsparse.errors import UserError
from qsparse.models import MLP

HEADER = "qsparse_model"


@pytest.fixture(autouse=True)
def in_empty_directory(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


@pytest.fixture
def model() -> MLP:
    return MLP((784, 32, 10), seed=7)


@pytest.fixture
def images() -> torch.Tensor:
    return torch.randint(0, 256, (64, 784), dtype=torch.uint8, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def saved(model) -> Path:
    """The directory of a finished run."""
    run = checkpoint.new_run()
    checkpoint.save_model(run, model, {"train": {"epochs": 1}})
    return run


def variants(model: MLP) -> dict[str, MLP]:
    masks = sparse.prune(model, sparse.SparseConfig(pattern="2:4"))[1]  # which every format holds
    quantized = {dtype: quant.quantize(model, dtype) for dtype in quant.DTYPES}
    ways = [*((kind, None) for kind in sparse.FORMATS), ("csr", "int8"), ("2:4", "int8"), ("2:4", "bf16")]
    sparsified = {f"{kind} {dtype or ''}".strip(): sparse.sparsify(model, masks, kind, dtype) for kind, dtype in ways}
    return {"dense": model, **quantized, **sparsified}


# Models


@pytest.mark.parametrize(
    "kind",
    [
        "dense",
        "fp16",
        "bf16",
        "int8",
        "csr",
        "coo",
        "2:4",
        "bitmap",
        "entries",
        "auto",
        "csr int8",
        "2:4 int8",
        "2:4 bf16",
    ],
)
def test_a_model_comes_back_with_the_same_bytes_and_logits(model, images, kind):
    original = variants(model)[kind]
    file = checkpoint.save_model("here", original, {"variant": kind})
    loaded = checkpoint.load("here")
    assert loaded.describe() == original.describe()
    assert loaded.state_dict().keys() == original.state_dict().keys()
    for name, tensor in original.state_dict().items():
        assert loaded.state_dict()[name].dtype == tensor.dtype
        assert torch.equal(loaded.state_dict()[name], tensor)
    with torch.no_grad():
        assert torch.equal(loaded(images), original(images))
    assert not loaded.training
    assert file == Path("here/model.safetensors")
    assert json.loads(Path("here/config.json").read_text())["variant"] == kind


def test_layers_without_weights_left_come_back(model, images):
    masks = {name: torch.zeros_like(w, dtype=torch.bool) for name, w in sparse.prunable_weights(model).items()}
    for kind in sparse.FORMATS:
        empty = sparse.sparsify(model, masks, kind)
        checkpoint.save_model(kind, empty, {})
        with torch.no_grad():
            assert torch.equal(checkpoint.load(kind)(images), empty(images))


def test_a_sparse_model_is_stored_without_its_mask(model, saved):
    masks = sparse.magnitude_masks(sparse.prunable_weights(model), 0.1)
    file = checkpoint.save_model(saved / "csr-0.1", sparse.sparsify(model, masks, "csr"), {})
    assert file.stat().st_size < 0.25 * (saved / "model.safetensors").stat().st_size


def test_load_takes_a_run_a_variant_a_file_and_a_string(model, saved):
    checkpoint.save_model(saved / "int8", quant.quantize(model, "int8"), {"variant": "int8"})
    assert checkpoint.load(str(saved)).describe() == model.describe()
    assert checkpoint.load(saved / "model.safetensors").describe() == model.describe()
    assert type(checkpoint.load("runs/1/int8").layers()["fc1"]).__name__ == "QuantLinear"
    assert qsparse.load("runs/1", device="cpu").sizes == (784, 32, 10)
    assert qsparse.load("runs/1", device=torch.device("cpu")).sizes == (784, 32, 10)


def test_a_loaded_model_outlives_its_file(saved, model, images):
    loaded = checkpoint.load(saved)
    (saved / "model.safetensors").write_bytes(b"")
    with torch.no_grad():
        assert torch.equal(loaded(images), model(images))


@pytest.mark.parametrize("kept", [0, 4, 8, 200, -1])
def test_a_truncated_file_is_refused(saved, kept):
    file = saved / "model.safetensors"
    file.write_bytes(file.read_bytes()[:kept])
    with pytest.raises(UserError, match=r"model\.safetensors is truncated, or no safetensors file"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    "content",
    [b"PK\x03\x04" + bytes(500), b"hello " * 200, save({"weight": torch.ones(3)}), save({}, {"format": "pt"})],
    ids=["torch.save", "text", "other safetensors", "empty safetensors"],
)
def test_a_foreign_file_is_refused(saved, content):
    (saved / "model.safetensors").write_bytes(content)
    with pytest.raises(UserError, match=r"no safetensors file|is not a qsparse model"):
        checkpoint.load(saved)


@pytest.mark.parametrize(
    "description",
    [
        "not json",
        "[]",
        "{}",
        '{"layers": {"fc1": {"kind": "Conv2d"}}}',
        '{"layers": {"fc1": {"kind": "Linear"}}}',
        '{"layers": {"fc1": {"kind": "Linear", "in_features": -3, "out_features": 2, "bias": true, '
        '"activation": null, "dtype": "float32"}}}',
        '{"layers": {"fc1": {"kind": "Linear", "in_features": 3, "out_features": 2, "bias": true, '
        '"activation": null, "dtype": "int4"}}}',
    ],
)
def test_a_description_that_describes_no_model_is_refused(saved, description):
    save_file({"fc1.weight": torch.ones(2, 3)}, saved / "model.safetensors", {HEADER: description})
    with pytest.raises(UserError, match="describes a model that this version of qsparse does not know"):
        checkpoint.load(saved)


def rewrite(run: Path, model: MLP, **changes: torch.Tensor | None) -> None:
    """Write the run's model file again with some tensors changed, added, or (None) left out."""
    tensors = {**load_file(run / "model.safetensors"), **{k.replace("__", "."): v for k, v in changes.items()}}
    tensors = {name: tensor.contiguous() for name, tensor in tensors.items() if tensor is not None}
    save_file(tensors, run / "model.safetensors", {HEADER: json.dumps(model.describe())})


def test_missing_and_surplus_tensors_are_named(saved, model):
    rewrite(saved, model, fc2__bias=None)
    with pytest.raises(UserError, match=r"lacks fc2\.bias$"):
        checkpoint.load(saved)
    rewrite(saved, model, fc2__bias=model.fc2.bias.detach(), fc3__weight=torch.ones(2, 2))
    with pytest.raises(UserError, match=r"no place for: fc3\.weight$"):
        checkpoint.load(saved)


def test_wrong_shapes_and_dtypes_are_named(saved, model):
    rewrite(saved, model, fc1__weight=model.fc1.weight.detach().T)
    with pytest.raises(UserError, match=r"fc1\.weight is float32 \(784, 32\), and its layer needs float32 \(32, 784\)"):
        checkpoint.load(saved)
    rewrite(saved, model, fc1__weight=model.fc1.weight.detach().half())
    with pytest.raises(UserError, match=r"fc1\.weight is float16 .* needs float32"):
        checkpoint.load(saved)


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_weights_that_are_not_finite_are_refused_by_layer(saved, model, value):
    weight = model.fc2.weight.detach().clone()
    weight[3, 5] = value
    rewrite(saved, model, fc2__weight=weight)
    with pytest.raises(UserError, match="layer fc2 holds NaN or infinite values in its weight"):
        checkpoint.load(saved)


def test_a_scale_that_is_nan_is_refused(saved, model):
    int8 = quant.quantize(model, "int8")
    checkpoint.save_model(saved / "int8", int8, {})
    rewrite(saved / "int8", int8, fc1__weight_scale=torch.full((32,), math.nan))
    with pytest.raises(UserError, match="layer fc1 holds NaN or infinite values in its weight_scale"):
        checkpoint.load(saved / "int8")


def test_sparse_indices_out_of_range_are_refused(saved, model):
    csr = variants(model)["csr"]
    checkpoint.save_model(saved / "csr", csr, {})
    columns = csr.fc1.col_indices.clone()
    columns[2] = 784
    rewrite(saved / "csr", csr, fc1__col_indices=columns)
    with pytest.raises(UserError, match=r"broken sparse layer: .*col_indices"):
        checkpoint.load(saved / "csr")


def test_no_such_run_names_the_command():
    with pytest.raises(UserError, match="there is no run runs/9: make one with `qsparse train`"):
        checkpoint.load("runs/9")
    Path("empty").mkdir()
    with pytest.raises(UserError, match="empty holds no qsparse run"):
        checkpoint.load("empty")


@pytest.mark.parametrize("text", ["", "{", "[1]", '{"architectures": []}', '{"model": {}, "train": 5}', b"\xff\xfe"])
def test_a_foreign_config_is_refused(text):
    Path("theirs").mkdir()
    Path("theirs/config.json").write_bytes(text if isinstance(text, bytes) else text.encode())
    for read in (checkpoint.load, checkpoint.read_config):
        with pytest.raises(UserError, match=r"theirs/config\.json"):
            read("theirs")


@pytest.mark.parametrize("path", [None, 5, b"runs/1", ["runs/1"]])
def test_a_path_of_another_kind_is_named(path):
    with pytest.raises(TypeError, match=r"^path must be a run's directory, as a text or a Path, got"):
        checkpoint.load(path)


def test_a_variant_that_lost_its_weights_is_not_called_an_unfinished_training(saved, model):
    checkpoint.save_model(saved / "int8", quant.quantize(model, "int8"), {"variant": "int8"}).unlink()
    with pytest.raises(UserError, match=r"runs/1/int8 holds no model\.safetensors: compress the run again"):
        checkpoint.load(saved / "int8")


def test_a_failed_write_leaves_the_old_file(saved, model, monkeypatch):
    before = (saved / "model.safetensors").read_bytes()

    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.fsync", full)
    with pytest.raises(UserError, match=r"cannot write .*No space left on device"):
        checkpoint.save_model(saved, MLP((784, 10)), {})
    assert (saved / "model.safetensors").read_bytes() == before
    assert sorted(path.name for path in saved.iterdir()) == ["config.json", "model.safetensors"]


DEEP = "[" * 100_000  # Python's parser gives up on it by a RecursionError
TEXT_METRICS = '{"seconds": "x", "validation_accuracy": null, "test_accuracy": 0.9}'
NO_ACCURACY = '{"seconds": 1, "validation_accuracy": 0.9, "test_accuracy": null}'


@pytest.mark.parametrize(
    "text",
    [
        *("", "[]", DEEP, '{"epochs": 5}', '{"epochs": []}', '{"epochs": [1]}', '{"epochs": [{}]}'),
        *(f'{{"epochs": [{entry}]}}' for entry in (TEXT_METRICS, NO_ACCURACY)),
    ],
)
def test_foreign_metrics_are_refused(saved, text):
    with pytest.raises(UserError, match=r"runs/1/metrics\.json, the metrics of the finished epochs, is missing"):
        checkpoint.read_metrics(saved)
    (saved / "metrics.json").write_text(text)
    with pytest.raises(UserError, match=r"runs/1/metrics\.json (is not JSON|does not hold the metrics)"):
        checkpoint.read_metrics(saved)


# Run directories


def test_numbers_go_on_from_the_highest():
    assert checkpoint.new_run() == Path("runs/1")
    (Path("runs") / "7").mkdir()
    (Path("runs") / "named").mkdir()
    (Path("runs") / "9").write_text("a file")
    assert checkpoint.new_run() == Path("runs/10")


def test_two_processes_never_get_the_same_number():
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        made = list(pool.map(lambda _: checkpoint.new_run(), range(64)))
    assert len(set(made)) == 64


def test_a_root_that_is_a_file_is_refused():
    Path("runs").write_text("")
    with pytest.raises(UserError, match="cannot make a run directory under runs"):
        checkpoint.new_run()


def test_the_newest_run_is_the_one_that_began_last(model):
    with pytest.raises(UserError, match="no run under runs/ yet: make one with `qsparse train`"):
        checkpoint.newest_run()
    for name in ("10", "2", "mine"):
        checkpoint.save_model(Path("runs") / name, model, {"train": {}})
    (Path("runs") / "11").mkdir()
    assert checkpoint.runs() == [Path("runs/10"), Path("runs/2"), Path("runs/mine")]
    assert checkpoint.newest_run() == Path("runs/mine")


def test_find_run_refuses_a_variant_and_names_its_run(saved, model):
    checkpoint.save_model(saved / "int8", quant.quantize(model, "int8"), {"variant": "int8"})
    assert checkpoint.find_run(None) == saved
    assert checkpoint.find_run("runs/1") == saved
    with pytest.raises(UserError, match=r"runs/1/int8 holds the compressed model 'int8': give its run, runs/1"):
        checkpoint.find_run(saved / "int8")
    with pytest.raises(UserError, match="there is no run runs/5"):
        checkpoint.find_run("runs/5")


def test_require_writable_leaves_nothing_behind():
    checkpoint.require_writable("a/b/c")
    assert list(Path().iterdir()) == []
    Path("file").write_text("")
    with pytest.raises(UserError, match="cannot write in file/x: Not a directory"):
        checkpoint.require_writable("file/x")


# The checkpoint of a training


def test_a_checkpoint_comes_back_whole(saved, model):
    momentum = {name: torch.randn_like(parameter) for name, parameter in model.named_parameters()}
    metrics = [{"epoch": 1, "loss": 0.1 + 0.2, "validation_accuracy": None, "test_accuracy": 0.9, "seconds": 1}]
    checkpoint.save_checkpoint(saved, model, momentum, metrics)
    other = MLP((784, 32, 10), seed=8)
    state = checkpoint.load_checkpoint(saved, other)
    assert state.metrics == metrics
    assert all(torch.equal(state.momentum[name], buffer) for name, buffer in momentum.items())
    assert all(torch.equal(other.state_dict()[name], tensor) for name, tensor in model.state_dict().items())
    checkpoint.drop_checkpoint(saved)
    assert checkpoint.load_checkpoint(saved, other) is None


def test_a_bad_checkpoint_is_refused(saved, model):
    file = saved / "checkpoint.safetensors"
    checkpoint.save_checkpoint(saved, model, {}, [])
    with pytest.raises(UserError, match=r"fc1\.weight is float32 \(32, 784\), and its layer needs float32 \(16, 784\)"):
        checkpoint.load_checkpoint(saved, MLP((784, 16, 10)))
    for buffer in (torch.zeros(3), torch.zeros(32, 784, dtype=torch.float16)):
        checkpoint.save_checkpoint(saved, model, {"fc1.weight": buffer}, [])
        with pytest.raises(UserError, match=r"a momentum buffer fc1\.weight that its model has no place for"):
            checkpoint.load_checkpoint(saved, model)
    for header in ("", "[]", "{}", DEEP, '{"metrics": 5}', f'{{"metrics": [{TEXT_METRICS}]}}'):
        save_file({}, file, {"qsparse_checkpoint": header})
        with pytest.raises(UserError, match="is not a qsparse checkpoint"):
            checkpoint.load_checkpoint(saved, model)
    checkpoint.save_checkpoint(saved, model, {}, [])
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(UserError, match="is truncated"):
        checkpoint.load_checkpoint(saved, model)
    file.write_bytes((saved / "model.safetensors").read_bytes())
    with pytest.raises(UserError, match="is not a qsparse checkpoint"):
        checkpoint.load_checkpoint(saved, model)


# Rows


def test_rows_are_appended_and_come_back(saved):
    assert checkpoint.read_rows(saved) == []
    checkpoint.append_rows(saved, [{"a": 0.1}, {"b": None, "c": "é"}])
    checkpoint.append_rows(saved, [{"d": {"1": 2.5}}])
    assert checkpoint.read_rows(saved) == [{"a": 0.1}, {"b": None, "c": "é"}, {"d": {"1": 2.5}}]
    assert len((saved / "rows.jsonl").read_text().splitlines()) == 3


def test_rows_of_several_writers_do_not_mix(saved):
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: checkpoint.append_rows(saved, [{"n": n, "pad": "x" * 5000}] * 2), range(40)))
    assert sorted(row["n"] for row in checkpoint.read_rows(saved)) == sorted([*range(40), *range(40)])


def test_a_row_with_nan_is_not_written(saved):
    with pytest.raises(ValueError, match="JSON"):
        checkpoint.append_rows(saved, [{"ok": 1}, {"accuracy": math.nan}])
    assert not (saved / "rows.jsonl").exists()


def test_half_a_line_spoils_no_row_that_follows(saved):
    (saved / "rows.jsonl").write_text('{"a": 1}\n{"half')
    checkpoint.append_rows(saved, [{"b": 2}])
    assert (saved / "rows.jsonl").read_text() == '{"a": 1}\n{"half\n{"b": 2}\n'


def test_only_a_newline_ends_a_row(saved):
    (saved / "rows.jsonl").write_text('{"a": "\u2028\x85"}\n', encoding="utf-8")
    assert checkpoint.read_rows(saved) == [{"a": "\u2028\x85"}]
    (saved / "rows.jsonl").write_text("")
    assert checkpoint.read_rows(saved) == []


@pytest.mark.parametrize("line", ["{", "[1]", "3", "", DEEP, '{"accuracy": NaN}', '{"accuracy": 1e999}'])
def test_a_broken_line_is_named(saved, line):
    (saved / "rows.jsonl").write_text('{"a": 1}\n' + line + "\n")
    with pytest.raises(UserError, match=r"rows\.jsonl: line 2 is not a JSON object"):
        checkpoint.read_rows(saved)
