import dataclasses
import math

import pytest
import torch

from qsparse import sparse
from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.sparse import SparseConfig, parse_pattern


def test_defaults_are_magnitude_over_all_layers_in_csr():
    config = SparseConfig(0.1)
    assert (config.pruner, config.distribution, config.format, config.pattern) == ("magnitude", "global", "csr", None)
    assert config.variant == "csr-0.1"


@pytest.mark.parametrize(
    ("pruner", "own"),
    [("magnitude", "global"), ("random", "global"), ("snip", "global"), ("wanda", "uniform"), ("sparsegpt", "uniform")],
)
def test_a_pruner_brings_its_papers_distribution(pruner, own):
    assert SparseConfig(0.1, pruner).distribution == own
    assert SparseConfig(0.1, pruner, "erk").distribution == "erk"


def test_variants_differ_by_options():
    configs = [
        SparseConfig(0.1),
        SparseConfig(0.2),
        SparseConfig(0.1, format="coo"),
        SparseConfig(0.1, "wanda"),
        SparseConfig(0.1, "wanda", "erk"),
        SparseConfig(0.1, "wanda", samples=7),
        SparseConfig(0.1, "wanda", min_density=0.05),
        SparseConfig(0.1, distribution="uniform"),
        SparseConfig(pattern="2:4"),
        SparseConfig(pattern="1:4"),
        SparseConfig(pattern="2:4", pruner="sparsegpt"),
        SparseConfig(format="2:4"),
        SparseConfig(format="2:4", pattern="1:4"),
        SparseConfig(format="2:4", dtype="bf16"),
        SparseConfig(format="2:4", dtype="int8"),
        SparseConfig(0.1, format="auto"),
        SparseConfig(0.1, format="auto", auto="time"),
        SparseConfig(0.1, dtype="fp16"),
    ]
    names = [config.variant for config in configs]
    assert len(set(names)) == len(names)
    assert names[8] == "csr-2of4"
    assert names[11:] == [
        "2of4", "2of4-1of4", "2of4-bf16", "int8-2of4", "auto-0.1", "autotime-0.1", "csr-0.1-fp16"
    ]  # fmt: skip
    assert not any(set(name) & set("/:\\ ") for name in names)
    assert SparseConfig(0.1, dtype="fp32").variant == SparseConfig(0.1).variant


def test_the_batch_that_chose_by_time_is_in_the_name():
    names = {SparseConfig(0.3, format="auto", auto="time", auto_batch=batch).variant for batch in (1, 64, 1024)}
    assert names == {"autotime-batch1-0.3", "autotime-batch64-0.3", "autotime-0.3"}


def test_the_format_2_of_4_says_the_pattern_itself():
    for config in (
        SparseConfig(format="2:4"),
        SparseConfig(0.5, format="2:4"),
        SparseConfig(pattern="2:4", format="2:4"),
    ):
        assert (config.density, config.pattern) == (None, "2:4")
    for pattern in ("1:4", "1:2", "1:3", "2:8", "2:12"):
        assert SparseConfig(pattern=pattern, format="2:4").pattern == pattern
    for pattern in ("3:4", "4:8", "2:3", "2:5", "2:6"):
        with pytest.raises(UserError, match=f"{pattern} may keep more"):
            SparseConfig(pattern=pattern, format="2:4")


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({}, "Give one of a density"),
        ({"density": 0.5, "pattern": "2:4"}, "not both"),
        ({"density": 0.0}, "above 0"),
        ({"density": math.nan}, "above 0"),
        ({"density": 0.5, "pruner": "obd"}, "unknown pruner 'obd': choose one of magnitude, random, wanda, snip"),
        ({"density": 0.5, "distribution": "even"}, "unknown distribution 'even': choose one of global, uniform, erk"),
        ({"density": 0.5, "format": "bsr"}, "unknown format 'bsr': choose one of csr, coo"),
        ({"density": 0.5, "min_density": 0.6}, r"min_density is 0\.6: it must be from 0 to the density, 0\.5"),
        ({"density": 0.5, "min_density": -0.1}, "min_density"),
        ({"density": 0.5, "min_density": math.nan}, "min_density"),
        ({"density": 0.5, "samples": 0}, "samples is 0"),
        ({"density": 0.5, "seed": -1}, "seed is -1"),
        ({"density": 0.5, "seed": True}, "seed is True"),
        ({"density": "half"}, "The density is 'half': it must be a number"),
        ({"density": [0.5]}, r"The density is \[0\.5\]: it must be a number"),
        ({"density": 0.5, "min_density": "low"}, "min_density is 'low': it must be a number"),
        ({"density": 0.5, "min_density": None}, "min_density is None: it must be a number"),
        ({"density": 0.5, "samples": "many"}, "samples is 'many': it must be a whole number"),
        ({"density": 0.5, "seed": 1.5}, r"seed is 1\.5: it must be a whole number"),
        ({"density": 0.5, "pruner": ["wanda"]}, r"unknown pruner \['wanda'\]"),
        ({"density": 0.5, "distribution": {}}, "unknown distribution {}"),
        ({"density": 0.5, "format": None}, "unknown format None"),
        ({"density": 0.5, "block": 16}, "The block must be RxC"),
        ({"pattern": 24}, "The pattern must be N:M"),
        ({"pattern": "2:4", "permute": "yes"}, "permute is 'yes': it must be True or False"),
        (
            {"density": 0.5, "permute": True},
            "--permute orders the columns for an N:M pattern, by scores: give --pattern",
        ),
        ({"format": "2:4", "permute": True}, "2:4 stores the columns in their own order"),
        ({"density": 0.3, "format": "2:4"}, r"2:4 stores 2 of each 4 weights, a density of 0\.5, not 0\.3"),
        ({"density": 0.5, "dtype": "fp8"}, "csr stores fp32 or fp16 or bf16 or int8, not 'fp8'"),
        ({"density": 0.5, "format": "coo", "dtype": "int8"}, "coo stores fp32 or fp16 or bf16, not 'int8'"),
        ({"density": 0.5, "auto": "speed"}, "unknown auto 'speed': choose one of bytes, time"),
        ({"density": 0.5, "auto_batch": 0}, "auto_batch is 0"),
        ({"pattern": "2:4", "distribution": "erk"}, "give no distribution"),
        ({"pattern": "2:4", "min_density": 0.1}, "give no distribution"),
    ],
)
def test_what_is_refused(fields, message):
    with pytest.raises(UserError, match=message):
        SparseConfig(**fields)


def test_it_is_frozen():
    with pytest.raises(dataclasses.FrozenInstanceError):
        SparseConfig(0.1).density = 0.2


@pytest.mark.parametrize(("text", "pair"), [("2:4", (2, 4)), ("1:4", (1, 4)), ("4:8", (4, 8)), ("1:2", (1, 2))])
def test_patterns(text, pair):
    assert parse_pattern(text) == pair


@pytest.mark.parametrize(
    "text", ["", "4:2", "0:4", "4:4", "2", "a:b", "2:4:8", "-1:4", "2:33", "2 : 4", "²:4", "2:4\n"]
)
def test_rubbish_patterns_are_refused(text):
    with pytest.raises(UserError, match=r"N:M with 1 <= N < M <= 32"):
        parse_pattern(text)


def test_arguments_of_another_kind_are_named():
    model = MLP((12, 8, 4))
    w, masks = torch.ones(3, 4), {name: layer.weight > 0 for name, layer in model.layers().items()}
    for call, error, message in (
        (lambda: sparse.sparsify(model, masks, 5), TypeError, "format must be a name, or a dict .*, not int"),
        (lambda: sparse.sparsify(model, masks, None), TypeError, "format must be a name, or a dict .*, not NoneType"),
        (lambda: sparse.sparsify(model, masks, ["csr"]), TypeError, "format must be a name, or a dict .*, not list"),
        (lambda: sparse.choose_formats(model, masks, "x"), UserError, "auto stores fp32 or fp16 or .*, not 'x'"),
        (lambda: sparse.choose_formats(model, masks, []), UserError, "auto stores fp32 or fp16 or .*, not "),
        (lambda: sparse.choose_formats(model, masks, by="time", batch=0), ValueError, "batch must be .*, not 0"),
        (lambda: sparse.choose_formats(model, masks, by="time", batch="9"), ValueError, "batch must be .*, not '9'"),
        (lambda: sparse.layer_counts({"a": w}, 0.5, "x"), UserError, "unknown distribution 'x': choose one of global"),
        (lambda: sparse.layer_counts({"a": w}, "x", "erk"), UserError, "The density is 'x': it must be a number"),
        (lambda: sparse.layer_counts({"a": w}, 1.5, "erk"), UserError, "The density must be above 0"),
        (lambda: sparse.layer_counts({"a": 5}, 0.5, "erk"), TypeError, "scores of layer a must be a torch.Tensor"),
        (lambda: sparse.magnitude_masks(w, 0.5), TypeError, "weights must be a dict .*, not Tensor"),
        (
            lambda: sparse.magnitude_masks({"a": w.numpy()}, 0.5),
            TypeError,
            "weights of layer a must be .* ndarray",
        ),
        (lambda: sparse.mask_density({"a": 5}), TypeError, "masks of layer a must be a torch.Tensor, not int"),
    ):
        with pytest.raises(error, match=message):
            call()
