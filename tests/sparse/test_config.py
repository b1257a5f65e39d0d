import dataclasses
import math

import pytest

from qsparse.errors import UserError
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
    ]
    names = [config.variant for config in configs]
    assert len(set(names)) == len(names)
    assert names[8] == "csr-2of4"
    assert not any(set(name) & set("/:\\ ") for name in names)


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
