"""Plans: what a trial may propose, and the model that is made of a plan."""

from __future__ import annotations

import dataclasses

import optuna
import pytest
import torch

from qsparse import data, quant
from qsparse.models import MLP
from qsparse.nn import Linear, QuantLinear, SparseLinear
from qsparse.quant import quantize
from qsparse.search.plan import DTYPES, Choice, build, suggest
from qsparse.train.config import TrainConfig

LAYERS = ("fc1", "fc2", "fc3")


@pytest.fixture(scope="module")
def dataset():
    return data.load("mnist-5k")


@pytest.fixture(scope="module")
def model():
    return MLP((784, 24, 16, 10), seed=3)


def test_each_layer_is_what_its_choice_says(model, dataset):
    plan = {"fc1": Choice("fp16", 0.1), "fc2": Choice("int8"), "fc3": Choice("bf16")}
    made = build(model, plan, dataset)
    fc1, fc2, fc3 = made.layers().values()
    assert isinstance(fc1, SparseLinear)
    assert (fc1.format, fc1.nnz, fc1.values.dtype) == ("csr", round(0.1 * 784 * 24), torch.float16)
    assert isinstance(fc2, QuantLinear)
    assert isinstance(fc3, Linear)
    assert fc3.weight.dtype == torch.bfloat16
    assert torch.isfinite(made(dataset.test.images[:100])).all()


def test_float32_is_the_model_itself(model, dataset):
    made = build(model, dict.fromkeys(LAYERS, Choice("fp32")), dataset)
    x = dataset.test.images[:100]
    assert torch.equal(made(x), model(x))


@pytest.mark.parametrize("dtype", DTYPES[1:])
def test_all_layers_alike_are_the_quantized_model(model, dataset, dtype):
    x = dataset.test.images[:100]
    assert torch.equal(build(model, dict.fromkeys(LAYERS, Choice(dtype)), dataset)(x), quantize(model, dtype)(x))


def test_finetuning_holds_the_pruned_weights_at_zero_and_moves_the_others(model, dataset):
    plan = {"fc1": Choice("fp32", 0.1), "fc2": Choice("fp32"), "fc3": Choice("int8")}
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    small = dataclasses.replace(dataset, train=dataset.validation)
    made = build(model, plan, small, TrainConfig(epochs=1, device="cpu"))
    assert made.fc1.nnz == round(0.1 * 784 * 24)
    assert not torch.equal(made.fc2.weight, model.fc2.weight)
    assert all(torch.equal(tensor, before[name]) for name, tensor in model.state_dict().items())


def test_a_layer_keeps_a_weight_at_least(model, dataset):
    assert build(model, {**dict.fromkeys(LAYERS, Choice("fp32")), "fc3": Choice("fp32", 1e-6)}, dataset).fc3.nnz == 1


def test_a_trial_proposes_what_it_may():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    seen = set()
    for _ in range(60):
        plan = suggest(study.ask(), LAYERS, ("fp16", "int8"), 0.05, 0.2)
        assert tuple(plan) == LAYERS
        for choice in plan.values():
            seen.add((choice.dtype, choice.density is not None))
            assert choice.density is None or 0.05 <= choice.density <= 0.2
    assert seen == {("fp16", False), ("int8", False), ("fp16", True)}  # no kernel takes sparse int8


def test_int8_alone_leaves_no_sparse_layer():
    study = optuna.create_study(sampler=optuna.samplers.RandomSampler(seed=0))
    assert suggest(study.ask(), LAYERS, ("int8",), 0.05, 0.2) == dict.fromkeys(LAYERS, Choice("int8"))


def test_what_kernels_compute_can_be_chosen():
    assert {"fp32", *quant.config.DTYPES} == set(DTYPES)
