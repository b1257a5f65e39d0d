import datetime
import json
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch

import qsparse
from qsparse import measure as measuring
from qsparse.data import Split
from qsparse.errors import UserError
from qsparse.measure import BATCHES, measure
from qsparse.models import MLP
from qsparse.quant import DTYPES, QuantConfig, quantize
from qsparse.sparse import SparseConfig, magnitude_masks, prunable_weights, sparsify
from qsparse.sparse.config import STORED

FIELDS = [
    "run",
    "variant",
    "dtype",
    "granularity",
    "calibration",
    "method",
    "format",
    "density",
    "accuracy",
    "accuracy_change",
    "agreement",
    "latency_us",
    "speedup",
    "weight_bytes",
    "file_bytes",
    "peak_bytes",
    "kernel",
    "device",
    "simulated",
    "seed",
    "date",
    "commit",
]
QUICK = {"batches": (1, 4), "budget_s": 0.01}


def one_hot_split(pixels, labels, classes=5):
    """Images with one bright pixel each: `picker` classifies them as that pixel's number."""
    images = 255 * torch.nn.functional.one_hot(torch.tensor(pixels), classes)
    return Split(images.to(torch.uint8), torch.tensor(labels))


def picker(order):
    """A model whose class i lights up with pixel order[i]."""
    model = MLP((len(order), len(order)))
    with torch.no_grad():
        model.fc1.weight.copy_(torch.eye(len(order))[list(order)])
        model.fc1.bias.zero_()
    return model


def random_split(images=32, pixels=20, classes=4):
    generator = torch.Generator().manual_seed(0)
    return Split(
        torch.randint(0, 256, (images, pixels), dtype=torch.uint8, generator=generator),
        torch.randint(0, classes, (images,), generator=generator),
    )


def test_accuracy_change_and_agreement_are_counted_on_the_test_split():
    #                      right for the baseline: 0 1 2 3 . . ; for the variant, which swaps 0 and 1: . . 2 3 0 .
    test = one_hot_split([0, 1, 2, 3, 1, 4], [0, 1, 2, 3, 0, 0])
    models = {"dense": picker([0, 1, 2, 3, 4]), "swapped": picker([1, 0, 2, 3, 4])}
    dense, swapped = measure(models, test, baseline="dense", **QUICK)
    assert dense["accuracy"] == 4 / 6
    assert dense["accuracy_change"] == 0
    assert dense["agreement"] == 1
    assert swapped["accuracy"] == 3 / 6
    assert swapped["accuracy_change"] == pytest.approx(-100 / 6)
    assert swapped["agreement"] == 3 / 6
    assert dense["test_images"] == swapped["test_images"] == 6


def test_a_row_has_every_field_and_survives_json():
    model = MLP((20, 12, 4))
    models = {"baseline": model, "int8": quantize(model, "int8")}
    rows = measure(models, random_split(), run="runs/7", details={"int8": {"file_bytes": 5, "seed": 3}}, **QUICK)
    assert [row["variant"] for row in rows] == ["baseline", "int8"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row in rows:
        assert set(FIELDS) <= row.keys()
        for field in ("latency_us", "latency_us_p10", "latency_us_p90", "speedup", "repetitions"):
            assert list(row[field]) == ["1", "4"]
        for batch in ("1", "4"):
            assert 0 < row["latency_us_p10"][batch] <= row["latency_us"][batch] <= row["latency_us_p90"][batch]
            assert row["repetitions"][batch] >= 3
            expected = rows[0]["latency_us"][batch] / row["latency_us"][batch]
            assert row["speedup"][batch] == pytest.approx(expected)
        assert (row["op"], row["run"], row["peer"], row["device"]) == ("mlp", "runs/7", None, "cpu")
        assert (row["timer"], row["l2"], row["gpu"], row["cuda"], row["peak_bytes"]) == ("wall", None, None, None, None)
        assert row["simulated"] is False
        assert row["sizes"] == [20, 12, 4]
        assert row["torch"] == torch.__version__
        assert row["threads"] == torch.get_num_threads()
        assert row["kernel"] == models[row["variant"]].cpu_kernel()
        written = datetime.datetime.fromisoformat(row["date"])
        assert abs((datetime.datetime.now(datetime.UTC) - written).total_seconds()) < 300
    assert (rows[0]["file_bytes"], rows[0]["seed"]) == (None, None)
    assert (rows[1]["file_bytes"], rows[1]["seed"]) == (5, 3)


@pytest.mark.parametrize(
    ("compress", "expected"),
    [
        (lambda m: m, {"dtype": "float32", "format": "dense", "weight_bytes": 814_120}),
        (lambda m: quantize(m, "fp16"), {"dtype": "float16", "format": "dense", "weight_bytes": 407_060}),
        (lambda m: quantize(m, "bf16"), {"dtype": "bfloat16", "format": "dense", "weight_bytes": 407_060}),
        (
            lambda m: quantize(m, "int8"),
            # 203,264 weights of 1 byte, 266 scales and 266 biases of 4
            {"dtype": "int8", "granularity": "channel", "activations": "dynamic", "method": "absmax",
             "format": "dense", "weight_bytes": 203_264 + 8 * 266},
        ),
        (
            lambda m: sparsify(m, magnitude_masks(prunable_weights(m), 0.1), "csr"),
            # 20,326 values and columns, 257 + 11 row offsets, 266 biases, of 4 bytes each
            {"dtype": "float32", "format": "csr", "density": 20_326 / 203_264,
             "weight_bytes": 4 * (2 * 20_326 + 257 + 11 + 266)},
        ),
        (
            lambda m: sparsify(m, magnitude_masks(prunable_weights(m), 0.1), "coo"),
            {"dtype": "float32", "format": "coo", "density": 20_326 / 203_264,
             "weight_bytes": 4 * (3 * 20_326 + 266)},
        ),
        (
            # 1:4 in the storage of 2:4, of 2 bytes a value: half of the values are zeros
            lambda m: qsparse.sparsify(m, SparseConfig(pattern="1:4", format="2:4")),
            {"dtype": "float16", "format": "2:4", "density": 0.25, "weight_bytes": 203_264 * 9 // 8 + 2 * 266},
        ),
        (
            lambda m: sparsify(m, magnitude_masks(prunable_weights(m), 0.1), {"fc1": "csr", "fc2": "dense"}),
            {"dtype": "float32", "format": "csr+dense", "density": 20_326 / 203_264, "weight_bytes": None},
        ),
    ],
)  # fmt: skip
def test_what_a_model_is_and_its_bytes_to_the_byte(compress, expected):
    model = MLP((784, 256, 10))
    models = {"baseline": model, "variant": compress(model)}
    test = random_split(images=8, pixels=784, classes=10)
    row = measure(models, test, batches=(1,), budget_s=0.001)[1]
    unset = dict.fromkeys(("granularity", "activations", "calibration", "method", "density"))
    expected["weight_bytes"] = expected["weight_bytes"] or row["weight_bytes"]
    assert {field: row[field] for field in unset | expected} == unset | expected
    assert row["weight_ratio"] == expected["weight_bytes"] / 814_120


def test_a_pair_of_arrays_is_a_split():
    test, model = random_split(images=30), MLP((20, 12, 4))
    floats = (test.images.float() / 255 - 0.1307) / 0.3081
    rows = [measure({"baseline": model}, given, **QUICK)[0] for given in (
        test, (test.images, test.labels), (test.images.numpy(), test.labels.int().numpy()), (floats, test.labels),
        (floats.numpy().astype(">f4"), test.labels.numpy().astype(">i4")),
    )]  # fmt: skip
    assert len({row["accuracy"] for row in rows}) == 1
    assert {row["test_images"] for row in rows} == {30}


@pytest.mark.parametrize(
    ("models", "test", "message"),
    [
        ([MLP((20, 4))], random_split(), "models must be a dict from a variant's name to its model, not list"),
        ({"baseline": MLP((20, 4))}, torch.zeros(3, 20), "must be a Split, .* or a pair of arrays, not Tensor"),
        (
            {"baseline": MLP((20, 4))},
            (np.ma.zeros((3, 20), np.float32), np.zeros(3, np.int64)),
            r"images must be a plain numpy\.ndarray, got numpy\.ma\..*MaskedArray",
        ),
        ({"baseline": MLP((20, 4))}, None, "must be a Split, .* not NoneType"),
        ({"baseline": MLP((20, 4)), "mine": None}, random_split(), "mine must be a model, .* not NoneType"),
        ({"baseline": MLP}, random_split(), "baseline must be a model, .* not type"),
        ({"baseline": torch.nn.Identity()}, random_split(), "of linear layers, and this Identity has none"),
        (
            {"baseline": torch.nn.Sequential(torch.nn.Linear(20, 4), torch.nn.Flatten(0))},
            random_split(images=30),
            r"baseline must give logits, a tensor \(30, classes\), not \(120,\)",
        ),
        (
            {"baseline": MLP((20, 4))},
            (torch.zeros(3, 20), torch.zeros(3, dtype=torch.complex64)),
            "labels whole numbers, not torch.float32, torch.complex64",
        ),
    ],
)
def test_what_is_no_model_and_no_split_is_named(models, test, message):
    with pytest.raises(TypeError, match=message):
        measure(models, test)


def test_details_override_and_extend():
    model = MLP((20, 12, 4))
    details = {"baseline": {"method": "magic", "finetune_epochs": 2}}
    (row,) = measure({"baseline": model}, random_split(), details=details, **QUICK)
    assert (row["method"], row["finetune_epochs"]) == ("magic", 2)


def test_a_batch_larger_than_the_test_split_repeats_its_images():
    seen = []

    class Watching(MLP):
        def forward(self, x):
            seen.append(x)
            return super().forward(x)

    test = random_split(images=3)
    (row,) = measure({"baseline": Watching((20, 4))}, test, batches=(7,), budget_s=0.001)
    assert list(row["latency_us"]) == ["7"]
    assert seen[0].shape == (3, 20)
    torch.testing.assert_close(seen[-1], seen[0][[0, 1, 2, 0, 1, 2, 0]])


def test_the_timed_input_is_normalised_and_in_the_models_dtype():
    seen = {}

    class Watching(MLP):
        def forward(self, x):
            seen[x.dtype, len(x)] = x
            return super().forward(x)

    test = random_split()
    half = Watching((20, 4)).to(torch.bfloat16)
    measure({"baseline": Watching((20, 4)), "bf16": half}, test, batches=(2,), budget_s=0.001)
    assert set(seen) == {(dtype, n) for dtype in (torch.float32, torch.bfloat16) for n in (2, 32)}
    expected = (test.images[:2] / 255 - 0.1307) / 0.3081
    torch.testing.assert_close(seen[torch.float32, 2], expected)
    torch.testing.assert_close(seen[torch.bfloat16, 2].float(), expected, rtol=1e-2, atol=1e-2)


def test_outputs_that_are_not_finite_get_no_row():
    broken = MLP((20, 4))
    with torch.no_grad():
        broken.fc1.weight.fill_(3e38)
    with pytest.raises(UserError, match=r"outputs of broken are NaN or Inf for 32 of 32"):
        measure({"baseline": MLP((20, 4)), "broken": broken}, random_split(), **QUICK)


def test_a_peer_that_overflows_costs_its_own_row_only(monkeypatch):
    broken = torch.nn.Sequential(torch.nn.Linear(20, 4))
    torch.nn.init.constant_(broken[0].weight, 3e38)
    peers = {"torch_fp16_graph": broken, "torch_fp32_graph": torch.nn.Sequential(torch.nn.Linear(20, 4))}
    monkeypatch.setattr(measuring, "_torch_peers", lambda *_: peers)
    with pytest.warns(measuring.PeerWarning, match="outputs of torch_fp16_graph are NaN or Inf"):
        rows = measure({"baseline": MLP((20, 4))}, random_split(), **QUICK)
    assert [row["variant"] for row in rows] == ["baseline", "torch_fp32_graph"]


@pytest.mark.parametrize("wrong", [0.0, 1.01, float("nan")])
def test_a_kernel_that_is_wrong_at_one_batch_size_gets_no_row(wrong):
    class WrongAlone(MLP):
        def forward(self, x):
            return super().forward(x) * (wrong if len(x) == 4 else 1)

    with pytest.raises(UserError, match="outputs of wrong at batch 4 differ"):
        measure({"baseline": MLP((20, 4)), "wrong": WrongAlone((20, 4))}, random_split(), **QUICK)


def test_layers_of_several_dtypes_may_differ_by_their_rounding_and_no_more():
    class Rounded(MLP):
        def forward(self, x):
            return super().forward(x) * (self.off if len(x) == 4 else 1)

    for off, layers in ((1.01, {"fc2": "fp16"}), (1.01, {"fc1": "fp8"}), (1.01, {}), (1.1, {"fc2": "fp16"})):
        model = quantize(MLP((20, 8, 4)), QuantConfig("int8", layers=layers))
        model.__class__, model.off = Rounded, off
        if off < 1.1 and layers:
            measure({"baseline": model}, random_split(), **QUICK)
            continue
        with pytest.raises(UserError, match="outputs of baseline at batch 4 differ"):
            measure({"baseline": model}, random_split(), **QUICK)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_one_wrong_row_of_many_is_seen(dtype):
    class WrongInOneRow(MLP):
        def forward(self, x):
            out = super().forward(x)
            if len(x) == 20_000:
                out[12_345] = out[12_346]
            return out

    model = WrongInOneRow((20, 4)).to(dtype)
    with pytest.raises(UserError, match=r"outputs of baseline at batch 20,000 differ .*\(row 12345 by"):
        measure({"baseline": model}, random_split(), batches=(20_000,), budget_s=0.01)


def test_a_model_of_zeros_is_measured():
    model = MLP((20, 4))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    (row,) = measure({"baseline": model}, random_split(), **QUICK)
    assert 0 <= row["accuracy"] <= 1


def test_wrong_names_and_an_empty_split_are_refused():
    model = MLP((20, 4))
    with pytest.raises(ValueError, match="'baseline'"):
        measure({"int8": model}, random_split())
    with pytest.raises(ValueError, match="int4"):
        measure({"baseline": model}, random_split(), details={"int4": {}})
    with pytest.raises(ValueError, match="empty"):
        measure({"baseline": model}, random_split(images=0))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batches": (4, 0)}, "a batch size is 0: it must be a whole number"),
        ({"batches": ("1",)}, "a batch size is '1'"),
        ({"batches": (1.5,)}, "a batch size is 1.5"),
        ({"budget_s": float("nan")}, "budget_s is nan: it must be a number of seconds"),  # went on for ever
        ({"budget_s": None}, "budget_s is None"),
        ({"test": (torch.zeros(2, 20), torch.tensor([0, 4]))}, "labels must be from 0 to 3, the outputs of baseline"),
        ({"test": (torch.zeros(2, 20), torch.tensor([-1, 3]))}, "labels must be from 0 to 3"),
    ],
)
def test_numbers_that_are_none_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        measure({"baseline": MLP((20, 4))}, **{"test": random_split(), **QUICK, **options})


@pytest.mark.parametrize("details", ["x", {"baseline": None}])
def test_details_that_are_no_dicts_are_named(details):
    with pytest.raises(TypeError, match="details must be a dict"):
        measure({"baseline": MLP((20, 4))}, random_split(), details=details)


def test_no_gradients_are_kept():
    model = MLP((20, 4))
    measure({"baseline": model}, random_split(), **QUICK)
    assert all(parameter.grad is None for parameter in model.parameters())
    assert not model.training


def git(directory, *arguments):
    identity = ("-c", "user.name=test", "-c", "user.email=test@example.com")
    command = ["git", *identity, "-C", str(directory), *arguments]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()


def test_the_commit_is_that_of_the_checkout_that_tracks_the_file(tmp_path, monkeypatch):
    module = tmp_path / "qsparse" / "measure.py"
    module.parent.mkdir()
    module.write_text("")
    monkeypatch.setattr(measuring, "__file__", str(module))
    commit = measuring._commit.__wrapped__
    assert commit() is None  # no repository
    monkeypatch.setenv("QSPARSE_COMMIT", "abc123")
    assert commit() == "abc123"  # said by whoever copied the checkout
    monkeypatch.delenv("QSPARSE_COMMIT")
    git(tmp_path, "init", "-q")
    git(tmp_path, "commit", "-q", "--allow-empty", "-m", "empty")
    assert commit() is None  # a repository, but not the module's: as a site-packages inside somebody's checkout
    git(tmp_path, "add", ".")
    git(tmp_path, "commit", "-q", "-m", "module")
    assert commit() == git(tmp_path, "rev-parse", "HEAD")
    module.write_text("# edited")
    assert commit() == git(tmp_path, "rev-parse", "HEAD") + "-dirty"
    monkeypatch.setenv("PATH", str(Path(tmp_path, "nothing")))
    assert commit() is None  # no git


def test_the_default_batches_are_the_four():
    assert BATCHES == (1, 64, 1024, 10_000)


@pytest.mark.gpu
def test_a_gpu_run_has_cold_times_peers_and_peak_bytes():
    model = MLP((784, 256, 10))
    masks = magnitude_masks(prunable_weights(model), 0.5)
    models = {
        "baseline": model,
        "fp16": quantize(model, "fp16"),
        "int8": quantize(model, "int8"),
        "csr": sparsify(model, masks, "csr"),
        "coo": sparsify(model, masks, "coo"),
    }
    test = random_split(images=200, pixels=784, classes=10)
    on_cpu = measure({name: value.replace({}) for name, value in models.items()}, test, batches=(1,), budget_s=0.001)
    rows = measure(models, test, device="cuda", details={"baseline": {"seed": 4}}, batches=(1, 64, 10_000))
    assert [row["variant"] for row in rows] == [*models, "torch_fp32_graph", "torch_fp16_graph"]
    assert [row["peer"] for row in rows] == [None] * len(models) + ["torch_fp32_graph", "torch_fp16_graph"]
    assert json.loads(json.dumps(rows, allow_nan=False)) == rows
    for row in rows:
        assert (row["device"], row["timer"], row["l2"]) == ("cuda", "cuda_graph", "cold")
        assert row["gpu"] == torch.cuda.get_device_name()
        assert row["cuda"] == torch.version.cuda
        assert all(count >= 50 for count in row["repetitions"].values())
        assert all(0 < microseconds < 1e6 for microseconds in row["latency_us"].values())
        half = row["variant"] in ("fp16", "torch_fp16_graph")
        assert row["peak_bytes"] >= row["weight_bytes"] + 200 * 784 * (2 if half else 4)
        assert row["agreement"] > 0.9 or row["variant"] in ("csr", "coo")
    assert [row["weight_bytes"] for row in rows[-2:]] == [814_120, 407_060]
    assert [row["dtype"] for row in rows[-2:]] == ["float32", "float16"]
    for row, reference in zip(rows, on_cpu, strict=False):
        assert row["accuracy"] == pytest.approx(reference["accuracy"], abs=0.02)
        assert row["weight_bytes"] == reference["weight_bytes"]


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore:`torch.jit.script_method` is deprecated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:TensorFloat32 tensor cores .* available but not enabled:UserWarning")
@pytest.mark.filterwarnings("ignore:TypedStorage is deprecated:UserWarning")
def test_compiled_peers_and_no_peers(monkeypatch):
    import torch._inductor.config as inductor  # slow to import, and only this test needs it

    monkeypatch.setattr(inductor, "max_autotune_gemm_backends", "ATEN")  # one candidate: what is fastest is not asked
    model = MLP((784, 256, 10))
    test = random_split(images=64, pixels=784, classes=10)
    alone = measure({"baseline": model}, test, device="cuda", peers=False, batches=(64,))
    assert [row["variant"] for row in alone] == ["baseline"]
    rows = measure({"baseline": model}, test, device="cuda", compiled_peers=True, batches=(64,))
    assert [row["peer"] for row in rows[3:]] == ["torch_fp32_compiled", "torch_fp16_compiled"]
    assert [row["weight_bytes"] for row in rows[3:]] == [814_120, 407_060]


_STORED = [(format, dtype) for format, dtypes in STORED.items() for dtype in dtypes]


@pytest.mark.gpu
@pytest.mark.parametrize("kind", [*DTYPES, *_STORED], ids=str)
def test_whatever_a_model_is_made_of_its_time_is_measured_on_a_gpu(kind):
    model = MLP((784, 64, 10))
    if isinstance(kind, str):
        compressed = quantize(model, kind)
    else:
        weights = prunable_weights(model)
        masks = {name: (torch.arange(w.shape[1]) % 4 < 2).repeat(len(w), 1) for name, w in weights.items()}
        compressed = sparsify(model, masks, *kind)
    test = random_split(images=200, pixels=784, classes=10)
    (on_cpu,) = measure({"baseline": compressed.replace({})}, test, batches=(1,), budget_s=0.001)
    (row,) = measure({"baseline": compressed}, test, device="cuda", peers=False, batches=(1, 64))
    assert row["kernel"]
    assert all(0 < microseconds < 1e6 for microseconds in row["latency_us"].values())
    assert row["accuracy"] == pytest.approx(on_cpu["accuracy"], abs=0.02)
