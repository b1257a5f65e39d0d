"""The training loop against PyTorch's own, and what it promises about masks, resuming and divergence."""

import copy
import math

import pytest
import torch

from qsparse import data
from qsparse.data import Dataset, Split
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.train.config import TrainConfig
from qsparse.train.fit import STEPS_PER_LOOK, FitState, evaluate, fit


def random_split(count: int, seed: int) -> Split:
    """Images whose label is written in their pixels, so that a step in the right direction helps."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(0, 10, (count,), generator=generator)
    images = torch.randint(0, 120, (count, 784), dtype=torch.uint8, generator=generator)
    for row, label in enumerate(labels.tolist()):
        images[row, 78 * label : 78 * (label + 1)] += 100
    return Split(images, labels)


@pytest.fixture(scope="module")
def dataset() -> Dataset:
    return Dataset("custom", "random", random_split(150, 0), random_split(20, 1), random_split(30, 2))


def by_torch(model: MLP, train: Split, config: TrainConfig) -> torch.nn.Sequential:
    """Train a copy of `model` with torch.nn, torch.optim and a PyTorch learning-rate schedule."""
    modules = []
    for layer in model.layers().values():
        linear = torch.nn.Linear(layer.in_features, layer.out_features)
        linear.load_state_dict({"weight": layer.weight.detach().clone(), "bias": layer.bias.detach().clone()})
        modules += [linear, torch.nn.ReLU()]
    net = torch.nn.Sequential(*modules[:-1])
    optimizer = torch.optim.SGD(net.parameters(), config.lr, momentum=config.momentum, weight_decay=config.weight_decay)
    steps = math.ceil(len(train) / config.batch_size) * config.epochs
    schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1 - step / steps)
    for epoch in range(config.epochs):
        for images, labels in data.batches(train, config.batch_size, seed=config.seed, epoch=epoch):
            optimizer.zero_grad()
            inputs = (images.float() / 255 - 0.1307) / 0.3081
            torch.nn.functional.cross_entropy(net(inputs), labels).backward()
            optimizer.step()
            schedule.step()
    return net


@pytest.mark.parametrize(
    "config",
    [
        TrainConfig(hidden=(16,), epochs=3, batch_size=32, lr=0.05),
        TrainConfig(hidden=(16,), epochs=2, batch_size=32, lr=0.02, momentum=0.9, weight_decay=0.01),
        TrainConfig(hidden=(), epochs=2, batch_size=50, lr=0.02, momentum=0.5),
        TrainConfig(hidden=(24, 16, 12), epochs=2, batch_size=64, lr=0.05),
        TrainConfig(hidden=(16,), epochs=3, batch_size=1000, lr=0.05, weight_decay=0.1),
    ],
    ids=["last batch short", "momentum and decay", "no hidden layer", "three hidden layers", "batch above the data"],
)
def test_the_weights_are_those_of_torch_optim(dataset, config):
    model = MLP((784, *config.hidden, 10), seed=3)
    start = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    reference = by_torch(model, dataset.train, config)
    fit(model, dataset, config)
    for (name, got), want in zip(model.named_parameters(), reference.parameters(), strict=True):
        moved = (want - start[name]).norm()
        assert moved > 1e-3
        assert (got - want).norm() < 1e-4 * moved, name


def test_the_loss_is_the_mean_over_the_images_and_not_over_the_batches(dataset):
    config = TrainConfig(hidden=(), epochs=1, batch_size=149, lr=1e-9)
    model = MLP((784, 10), seed=1)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(model(dataset.train.images), dataset.train.labels).item()
    (metrics,) = fit(model, dataset, config)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_metrics_tell_of_each_epoch(dataset):
    config = TrainConfig(hidden=(16,), epochs=3, batch_size=10, lr=0.05)
    model, ends = MLP((784, 16, 10)), []
    metrics = fit(model, dataset, config, on_epoch=ends.append)
    assert [epoch["epoch"] for epoch in metrics] == [1, 2, 3]
    assert [end.epoch for end in ends] == [1, 2, 3]
    assert [len(end.metrics) for end in ends] == [1, 2, 3]
    assert metrics[-1]["loss"] < metrics[0]["loss"]
    assert metrics[-1]["test_accuracy"] == evaluate(model, dataset.test)[0]
    assert metrics[-1]["validation_accuracy"] == evaluate(model, dataset.validation)[0]


def test_without_a_validation_split_its_accuracy_is_null(dataset):
    without = Dataset("custom", "random", dataset.train, Split(*_rows(dataset.validation, 0)), dataset.test)
    (metrics,) = fit(MLP((784, 10)), without, TrainConfig(hidden=(), epochs=1))
    assert metrics["validation_accuracy"] is None


def test_an_empty_split_is_refused(dataset):
    empty = Split(*_rows(dataset.train, 0))
    with pytest.raises(ValueError, match="at least one image"):
        fit(MLP((784, 10)), Dataset("custom", "x", empty, empty, dataset.test), TrainConfig(hidden=()))
    with pytest.raises(ValueError, match="empty split"):
        evaluate(MLP((784, 10)), empty)


def test_progress_is_reported_now_and_then_and_at_the_end_of_an_epoch(dataset):
    seen = []
    fit(MLP((784, 10)), dataset, TrainConfig(hidden=(), epochs=2, batch_size=2), progress=seen.append)
    assert STEPS_PER_LOOK == 50
    assert [(now.epoch, now.step, now.steps) for now in seen] == [
        (epoch, step, 75) for epoch in (1, 2) for step in (50, 75)
    ]
    assert all(now.images_per_second > 0 and math.isfinite(now.loss) for now in seen)


@pytest.mark.parametrize(("momentum", "weight_decay"), [(0.0, 0.0), (0.9, 0.0), (0.0, 0.1), (0.9, 0.1)])
def test_masked_weights_stay_exactly_zero(dataset, momentum, weight_decay):
    config = TrainConfig(hidden=(16,), epochs=2, batch_size=32, momentum=momentum, weight_decay=weight_decay, lr=0.02)
    model = MLP((784, 16, 10), seed=5)
    before = copy.deepcopy(model)
    masks = {"fc1": torch.rand((16, 784), generator=torch.Generator().manual_seed(0)) < 0.1}
    zero_at_epoch_end = []

    def on_epoch(end):
        dead = ~masks["fc1"]
        zero_at_epoch_end.append(bool((end.model.fc1.weight[dead] == 0).all()))
        if momentum:
            zero_at_epoch_end.append(bool((end.momentum["fc1.weight"][dead] == 0).all()))

    fit(model, dataset, config, masks=masks, on_epoch=on_epoch)
    assert zero_at_epoch_end
    assert all(zero_at_epoch_end)
    alive = masks["fc1"]
    assert (model.fc1.weight[alive] != before.fc1.weight[alive]).float().mean() > 0.9
    assert (model.fc2.weight != 0).all()


def test_masked_weights_are_dead_from_the_first_forward_pass_on(dataset):
    masks = {"fc1": torch.zeros((10, 784), dtype=torch.bool)}
    model = MLP((784, 10), seed=5)
    bias_only = copy.deepcopy(model)
    torch.nn.init.zeros_(bias_only.fc1.weight)
    config = TrainConfig(hidden=(), epochs=1, batch_size=1000)
    with torch.no_grad():
        expected = torch.nn.functional.cross_entropy(bias_only(dataset.train.images), dataset.train.labels).item()
    (metrics,) = fit(model, dataset, config, masks=masks)
    assert metrics["loss"] == pytest.approx(expected, rel=1e-5)


def test_a_bad_mask_is_refused(dataset):
    config = TrainConfig(hidden=(), epochs=1)
    with pytest.raises(ValueError, match="no layer 'fc7'"):
        fit(MLP((784, 10)), dataset, config, masks={"fc7": torch.ones((10, 784), dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"must be bool \(10, 784\)"):
        fit(MLP((784, 10)), dataset, config, masks={"fc1": torch.ones((784, 10), dtype=torch.bool)})
    with pytest.raises(ValueError, match=r"must be bool \(10, 784\)"):
        fit(MLP((784, 10)), dataset, config, masks={"fc1": torch.ones((10, 784))})


def test_going_on_from_an_epoch_gives_the_same_bits(dataset):
    config = TrainConfig(hidden=(16,), epochs=4, batch_size=32, lr=0.02, momentum=0.9, weight_decay=0.01)
    saved = {}

    def keep(end):
        saved[end.epoch] = copy.deepcopy((end.model, end.momentum, end.metrics))

    whole = MLP((784, 16, 10), seed=2)
    metrics = fit(whole, dataset, config, on_epoch=keep)
    for epoch in (1, 3):
        model, momentum, so_far = saved[epoch]
        rest = fit(model, dataset, config, start_epoch=epoch, state=FitState(momentum, so_far))
        assert [entry["test_accuracy"] for entry in rest] == [entry["test_accuracy"] for entry in metrics]
        for name, tensor in whole.state_dict().items():
            assert torch.equal(model.state_dict()[name], tensor), name


def test_same_seed_same_bits_and_another_seed_other_bits(dataset):
    def weights(seed):
        model = MLP((784, 16, 10), seed=0)
        fit(model, dataset, TrainConfig(hidden=(16,), epochs=1, batch_size=32, seed=seed))
        return model.fc1.weight

    assert torch.equal(weights(1), weights(1))
    assert not torch.equal(weights(1), weights(2))


def test_a_loss_that_is_not_finite_stops_the_run_and_names_the_step(dataset):
    ends = []
    with pytest.raises(UserError, match=r"diverged: the loss is (nan|inf) at step [1-9]\d* of 600; .* smaller --lr"):
        fit(
            MLP((784, 64, 10), seed=0),
            dataset,
            TrainConfig(hidden=(64,), epochs=4, batch_size=1, lr=1e30),
            on_epoch=ends.append,
        )
    assert ends == []


def test_the_step_that_is_named_is_the_first_bad_one(dataset, monkeypatch):
    calls = 0

    def cross_entropy(logits, labels):
        nonlocal calls
        calls += 1
        loss = torch.nn.functional.cross_entropy(logits, labels)
        return loss * math.nan if calls == 62 else loss

    monkeypatch.setattr("qsparse.train.torch_backend.nn.cross_entropy", cross_entropy)
    with pytest.raises(UserError, match="the loss is nan at step 62 of 150"):
        fit(MLP((784, 10)), dataset, TrainConfig(hidden=(), epochs=2, batch_size=2))


def test_weights_that_are_not_finite_after_the_last_step_stop_the_run(dataset, monkeypatch):
    monkeypatch.setattr(
        "qsparse.train.torch_backend.kernels.sgd", lambda parameter, *_, **__: parameter.fill_(math.inf)
    )
    ends = []
    with pytest.raises(UserError, match="layer fc1 holds NaN or infinite values after epoch 1"):
        fit(MLP((784, 10)), dataset, TrainConfig(hidden=(), epochs=1, batch_size=150), on_epoch=ends.append)
    assert ends == []


def test_evaluate_counts_and_keeps_the_order_across_chunks():
    split = random_split(10_003, 4)
    model = MLP((784, 10), seed=1)
    accuracy, predictions = evaluate(model, split)
    with torch.no_grad():
        expected = model(split.images).argmax(dim=1)
    assert predictions.dtype == torch.int64
    assert torch.equal(predictions, expected)
    assert accuracy == (expected == split.labels).double().mean().item()


def _rows(split: Split, count: int) -> tuple[torch.Tensor, torch.Tensor]:
    return split.images[:count], split.labels[:count]
