"""The backends against each other, and their gradients against finite differences."""

import contextlib
import copy
import functools
import math

import numpy as np
import pytest
import torch

from qsparse import data, kernels
from qsparse.data import Dataset, Split
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.train import backends, c_backend, numpy_backend
from qsparse.train.config import TrainConfig
from qsparse.train.fit import FitState, fit

WRITTEN_OUT = ("numpy", "c")
STEPS = 200


@functools.cache
def digits() -> Dataset:
    return data.load("mnist-5k")


def fewer(count: int) -> Dataset:
    """The first `count` digits to train on, and a few others."""
    whole = digits()

    def first(split: Split, rows: int) -> Split:
        return Split(split.images[:rows], split.labels[:rows])

    return Dataset(
        "custom", "some digits", first(whole.train, count), first(whole.validation, 20), first(whole.test, 30)
    )


def losses(config: TrainConfig, train: Split, steps: int) -> torch.Tensor:
    """The loss of each of the first `steps` steps, as `fit` takes them."""
    model = MLP((784, *config.hidden, 10), seed=config.seed).to(train.images.device)
    parameters = dict(model.named_parameters())
    momentum = {name: torch.zeros_like(p) for name, p in parameters.items()} if config.momentum else {}
    backend = backends.make(model, config, momentum, {})
    found: list[float] = []
    epoch = 0
    with backends.threads_for(config.backend):
        while len(found) < steps:
            for images, labels in data.batches(train, config.batch_size, seed=config.seed, epoch=epoch):
                found.append(float(backend.step(images, labels, config.lr * (1 - len(found) / (2 * steps)))))
            epoch += 1
    return torch.tensor(found[:steps])


CONFIGS = {
    "no hidden layer": TrainConfig(hidden=(), lr=0.05),
    "one": TrainConfig(hidden=(64,)),
    "three": TrainConfig(hidden=(48, 33, 20)),
    "momentum and decay": TrainConfig(hidden=(64,), lr=0.02, momentum=0.9, weight_decay=1e-3),
    "last batch of one": TrainConfig(hidden=(32,), batch_size=53, lr=0.05, momentum=0.5),
    "batch above the data": TrainConfig(hidden=(16,), batch_size=10_000, lr=0.05),
}


@functools.cache
def curve(name: str, backend: str) -> torch.Tensor:
    config = CONFIGS[name]
    train = fewer(1 + 53 * 20).train if name == "last batch of one" else digits().train
    steps = 10 if config.batch_size > len(train) else STEPS
    return losses(TrainConfig(**{**config.to_json(), "backend": backend}), train, steps)


@pytest.mark.parametrize("backend", WRITTEN_OUT)
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_curves_agree(name, backend):
    got, want = curve(name, backend), curve(name, "torch")
    assert want[-5:].mean() < 0.9 * want[0]  # it learns, so that a step too small or too large would show
    assert (got - want).abs().max() < 1e-3


def epoch_losses(config: TrainConfig, train: Split, steps: int) -> torch.Tensor:
    """The same as `losses`, by a backend that takes whole epochs."""
    model = MLP((784, *config.hidden, 10), seed=config.seed).to(train.images.device)
    momentum = {name: torch.zeros_like(p) for name, p in model.named_parameters()} if config.momentum else {}
    backend = backends.make(model, config, momentum, {})
    assert isinstance(backend, backends.EpochBackend)
    found = torch.empty(0)
    for epoch in range(steps):
        if len(found) >= steps:
            break
        count = math.ceil(len(train) / config.batch_size)
        rates = [config.lr * (1 - step / (2 * steps)) for step in range(len(found), len(found) + count)]
        found = torch.cat([found, backend.epoch(train, epoch, rates)])
    return found[:steps]


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_the_loss_curves_of_whole_epochs_agree_on_a_gpu(name):
    config = TrainConfig(**{**CONFIGS[name].to_json(), "backend": "cuda"})
    train = fewer(1 + 53 * 20).train if name == "last batch of one" else digits().train
    want = curve(name, "torch")
    assert (epoch_losses(config, train.to("cuda"), len(want)) - want).abs().max() < 1e-3


ON_A_GPU = pytest.param("cuda", marks=pytest.mark.gpu)


@pytest.mark.gpu
@pytest.mark.parametrize("hidden", [(16,), (20, 30)])
def test_two_runs_on_a_gpu_have_the_same_bits(hidden):
    config = TrainConfig(hidden=hidden, epochs=2, lr=0.02, momentum=0.9, backend="cuda")
    models = [MLP((784, *hidden, 10)).cuda() for _ in range(2)]
    metrics = [fit(model, digits().to("cuda"), config) for model in models]
    assert [each["loss"] for each in metrics[0]] == [each["loss"] for each in metrics[1]]
    assert all(torch.equal(*pair) for pair in zip(models[0].parameters(), models[1].parameters(), strict=True))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["no hidden layer", "one", "three", "momentum and decay"])
def test_the_loss_curves_agree_on_a_gpu(name):
    config = TrainConfig(**{**CONFIGS[name].to_json(), "backend": "cuda"})
    assert (losses(config, digits().train.to("cuda"), STEPS) - curve(name, "torch")).abs().max() < 1e-3


@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_gradients_that_are_not_divided_by_the_batch_size_would_show(monkeypatch, backend):
    """The mistake itself, in the other backend: gradients summed over the batch instead of averaged."""
    config, train = CONFIGS["one"], digits().train
    got = losses(TrainConfig(**{**config.to_json(), "backend": backend}), train, 20)
    right = kernels.softmax_cross_entropy

    def summed(logits, labels):
        each, gradient = right(logits, labels)
        return each, gradient * len(labels)

    monkeypatch.setattr(kernels, "softmax_cross_entropy", summed)
    assert not (got - losses(config, train, 20)).abs().max() < 1e-3


def tiny(hidden: tuple[int, ...]) -> tuple[MLP, torch.Tensor, torch.Tensor]:
    """A net of few weights, and a batch of 5 (no multiple of what the C code takes at once)."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(5, 7, generator=generator)
    return MLP((7, *hidden, 4), seed=2), x, torch.randint(0, 4, (5,), generator=generator)


def finite_differences(parameters: list[np.ndarray], x: np.ndarray, labels: np.ndarray) -> list[np.ndarray]:
    """The gradient by central differences in float64 of a forward pass that shares no code with the backends."""

    def loss() -> float:
        y = x
        for number in range(0, len(parameters), 2):
            if number:
                y = np.where(y > 0, y, 0.0)
            y = np.einsum("mk,nk->mn", y, parameters[number]) + parameters[number + 1]
        each = [math.log(sum(math.exp(z) for z in row)) - row[label] for row, label in zip(y, labels, strict=True)]
        return sum(each) / len(each)

    found, step = [], 1e-6
    for parameter in parameters:
        gradient = np.empty_like(parameter)
        for index in np.ndindex(parameter.shape):
            kept = parameter[index]
            parameter[index] = kept + step
            above = loss()
            parameter[index] = kept - step
            gradient[index] = (above - loss()) / (2 * step)
            parameter[index] = kept
        found.append(gradient)
    return found


@pytest.mark.parametrize("hidden", [(), (6,), (6, 5, 3)])
def test_gradients_are_those_of_finite_differences(hidden):
    model, x, labels = tiny(hidden)
    exact = [parameter.detach().double().numpy() for parameter in model.parameters()]
    expected = finite_differences(exact, x.double().numpy(), labels.numpy())
    loss, by_numpy = numpy_backend.gradients(exact, x.double().numpy(), labels.numpy())
    in_c = c_backend.CBackend(model, TrainConfig(), {}, {})
    assert in_c.backward(x, labels) == pytest.approx(loss, rel=1e-5)
    for want, first, second in zip(expected, by_numpy, in_c.gradients, strict=True):
        assert np.abs(want).max() > 1e-3
        np.testing.assert_allclose(first, want, rtol=0, atol=1e-8)
        np.testing.assert_allclose(second.numpy(), want, rtol=0, atol=2e-6)


@functools.cache
def exact_gradients(hidden: tuple[int, ...]) -> list[np.ndarray]:
    """Of the mean loss of five digits, by each parameter."""
    parameters = [parameter.detach().double().numpy() for parameter in MLP((784, *hidden, 10), seed=2).parameters()]
    train = fewer(5).train
    pixels = (train.images.double() / 255 - data.MEAN) / data.STD
    return finite_differences(parameters, pixels.numpy(), train.labels.numpy())


EVERY_STEP = [
    *((backend, "step") for backend in ("torch", *WRITTEN_OUT)),
    *(pytest.param("cuda", way, marks=pytest.mark.gpu) for way in ("step", "epoch")),
]


@pytest.mark.parametrize("hidden", [(), (6,), (8, 7, 6)])
@pytest.mark.parametrize(("backend", "way"), EVERY_STEP)
def test_a_step_of_every_backend_is_along_the_gradient_of_finite_differences(backend, way, hidden):
    """With a learning rate of 1 and nothing else, a step takes from each parameter its gradient."""
    device = "cuda" if backend == "cuda" else "cpu"
    model, train = MLP((784, *hidden, 10), seed=2).to(device), fewer(5).train.to(device)
    before = [parameter.detach().cpu().double() for parameter in model.parameters()]
    taker = backends.make(model, TrainConfig(hidden=hidden, batch_size=5, backend=backend), {}, {})
    if way == "step":
        taker.step(train.images, train.labels, 1.0)
    else:
        taker.epoch(train, 0, [1.0])
    for start, parameter, exact in zip(before, model.parameters(), exact_gradients(hidden), strict=True):
        taken = (start - parameter.detach().cpu().double()).numpy()
        assert np.linalg.norm(exact) > 1e-3
        assert np.linalg.norm(taken - exact) < 2e-4 * np.linalg.norm(exact)


@pytest.mark.parametrize("hidden", [(16,), (20, 30)])
@pytest.mark.parametrize("backend", [*WRITTEN_OUT, ON_A_GPU])
def test_going_on_from_an_epoch_gives_the_same_bits(backend, hidden):
    device = "cuda" if backend == "cuda" else "cpu"
    config = TrainConfig(hidden=hidden, epochs=3, lr=0.02, momentum=0.9, weight_decay=0.01, backend=backend)
    dataset, saved = fewer(150).to(device), {}
    whole = MLP((784, *hidden, 10), seed=2).to(device)
    fit(whole, dataset, config, on_epoch=lambda end: saved.update({end.epoch: copy.deepcopy(end)}))
    end = saved[1]
    fit(end.model, dataset, config, start_epoch=1, state=FitState(end.momentum, end.metrics))
    assert all(torch.equal(a, b) for a, b in zip(end.model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize("backend", [*WRITTEN_OUT, ON_A_GPU])
@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_masked_weights_stay_exactly_zero(backend, momentum):
    masks = {"fc1": torch.rand((784, 16), generator=torch.Generator().manual_seed(0)).t() < 0.1}  # a strided view
    settings = {"hidden": (16,), "epochs": 1, "lr": 0.02, "momentum": momentum, "weight_decay": 0.1}
    models, ends = {}, []
    for name in (backend, "torch"):
        device = "cuda" if name == "cuda" else "cpu"
        model = MLP((784, 16, 10), seed=5).to(device)
        config = TrainConfig(**settings, backend=name)
        fit(model, fewer(150).to(device), config, masks=masks, on_epoch=ends.append)
        models[name] = model.cpu()
        ends[-1].momentum.update({key: value.cpu() for key, value in ends[-1].momentum.items()})
    assert (models[backend].fc1.weight[~masks["fc1"]] == 0).all()
    assert (models[backend].fc1.weight[masks["fc1"]] != 0).all()
    torch.testing.assert_close(models[backend].state_dict(), models["torch"].state_dict(), rtol=1e-4, atol=1e-6)
    if momentum:
        assert (ends[0].momentum["fc1.weight"][~masks["fc1"]] == 0).all()
        torch.testing.assert_close(ends[0].momentum, ends[1].momentum, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize("hidden", [(16,), (20, 30)])
@pytest.mark.parametrize("backend", [*WRITTEN_OUT, ON_A_GPU])
def test_a_loss_that_is_not_finite_names_the_step(backend, hidden):
    config = TrainConfig(hidden=hidden, epochs=1, batch_size=1, lr=1e30, backend=backend)
    device = "cuda" if backend == "cuda" else "cpu"
    with pytest.raises(UserError, match=r"the loss is (nan|inf) at step [1-9]\d* of 150"):
        fit(MLP((784, *hidden, 10)).to(device), fewer(150).to(device), config)


@pytest.mark.parametrize("backend", WRITTEN_OUT)
def test_nan_in_one_weight_reaches_the_loss(backend):
    for layer in ("fc1", "fc2"):
        model = MLP((784, 16, 10))
        with torch.no_grad():
            getattr(model, layer).weight[3] = math.nan
        batch = digits().train
        config = TrainConfig(hidden=(16,), backend=backend)
        assert math.isnan(backends.make(model, config, {}, {}).step(batch.images[:9], batch.labels[:9], 0.1)), layer


@pytest.mark.parametrize(("backend", "expected"), [("numpy", 1), ("c", 1), ("torch", 3)])
def test_pytorchs_threads_do_not_disturb_the_others(backend, expected):
    seen, before = [], torch.get_num_threads()
    torch.set_num_threads(3)
    try:
        for lr, raises in ((0.1, contextlib.nullcontext()), (1e30, pytest.raises(UserError, match="diverged"))):
            config = TrainConfig(hidden=(16,), epochs=1, lr=lr, batch_size=2, backend=backend)
            with raises:
                fit(MLP((784, 16, 10)), fewer(150), config, progress=lambda _: seen.append(torch.get_num_threads()))
            assert torch.get_num_threads() == 3
        assert seen
        assert set(seen) == {expected}
    finally:
        torch.set_num_threads(before)


def test_a_model_elsewhere_than_on_the_cpu_is_refused():
    with pytest.raises(ValueError, match="on the CPU"):
        backends.make(MLP((784, 10)).to("meta"), TrainConfig(backend="numpy"), {}, {})


class TestCompiling:
    @pytest.fixture(autouse=True)
    def own_cache(self, tmp_path, monkeypatch):
        monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "cache"))

    def test_without_a_compiler_the_package_is_named(self, tmp_path, monkeypatch):
        monkeypatch.setenv("PATH", str(tmp_path))
        monkeypatch.delenv("CC", raising=False)
        with pytest.raises(UserError, match=r"no cc or gcc or clang on the path: .*`apt install gcc libc6-dev`"):
            c_backend.load()

    def test_a_compiler_that_fails_is_quoted_and_leaves_nothing(self, tmp_path, monkeypatch):
        broken = tmp_path / "broken-cc"
        broken.write_text("#!/bin/sh\necho no such header >&2\nexit 1\n")
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        with pytest.raises(UserError, match="broken-cc cannot compile --backend c: no such header"):
            c_backend.load()
        assert list(c_backend.library_path().parent.iterdir()) == []

    @pytest.mark.parametrize("content", ["no program", "#!/bin/sh\n"])
    def test_a_compiler_that_is_none_is_named(self, tmp_path, monkeypatch, content):
        """It cannot be run, or says that it is done and has written no library."""
        broken = tmp_path / "broken-cc"
        broken.write_text(content)
        broken.chmod(0o755)
        monkeypatch.setenv("CC", str(broken))
        with pytest.raises(UserError, match=r"broken-cc (cannot compile --backend c: |and cannot be loaded: )"):
            c_backend.load()
        assert list(c_backend.library_path().parent.iterdir()) == []

    def test_the_compiler_may_have_options(self, monkeypatch):
        monkeypatch.setenv("CC", f"{c_backend.compiler()[0]} -g0 '-DA NAME=1'")
        assert c_backend.compiler()[1:] == ["-g0", "-DA NAME=1"]
        monkeypatch.setenv("CC", f"{c_backend.compiler()[0]} -g0")
        c_backend.load()
        monkeypatch.setenv("CC", "gcc '-O2")
        with pytest.raises(UserError, match=r"""CC is "gcc '-O2", which is no command: No closing quotation"""):
            c_backend.compiler()

    def test_a_cache_that_cannot_be_written_is_named(self, tmp_path, monkeypatch):
        (tmp_path / "file").touch()
        monkeypatch.setenv("QSPARSE_CACHE", str(tmp_path / "file"))
        with pytest.raises(UserError, match="QSPARSE_CACHE can name another place"):
            c_backend.load()

    def test_it_is_compiled_once_and_a_damaged_library_again(self, monkeypatch):
        path = c_backend.library_path()
        path.parent.mkdir(parents=True)
        path.write_bytes(b"half a file")
        c_backend.load()
        assert path.stat().st_size > 1000
        c_backend._load.cache_clear()
        monkeypatch.setattr(c_backend, "_compile", lambda path: pytest.fail("compiled again"))
        c_backend.load()
        assert [each.name for each in path.parent.iterdir()] == [path.name]

    def test_another_source_compiler_or_cpu_is_another_library(self, tmp_path, monkeypatch):
        monkeypatch.delenv("CC", raising=False)
        names = {c_backend.library_path().name}
        monkeypatch.setattr(c_backend, "_cpu", lambda: "another")
        names.add(c_backend.library_path().name)
        monkeypatch.setattr(c_backend, "SOURCE", tmp_path / "mlp.c")
        c_backend.SOURCE.write_text("int x;")
        names.add(c_backend.library_path().name)
        for command in ("gcc -O1", "clang"):
            monkeypatch.setenv("CC", command)
            names.add(c_backend.library_path().name)
        assert len(names) == 5
