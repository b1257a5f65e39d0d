"""Which configuration of the Hopper products a shape gets: what was measured there, or else what should be fastest."""

from __future__ import annotations

import itertools
import json
import math

import pytest
import torch

from qsparse.bench import tune
from qsparse.kernels import _gemm_int8_sm90, _gemm_single_sm90, _gemm_sm90_configs
from qsparse.kernels._gemm_costs import Costs, terms
from qsparse.kernels._gemm_single_sm90 import Single
from qsparse.kernels._gemm_sm90_configs import Config, choose, fastest, label, labelled, unwalked

H200 = "NVIDIA H200"
SIZES = (1, 7, 64, 100, 1000, 4096, 60_000)
SHAPES = [*itertools.product(SIZES, SIZES, SIZES), (2**29, 8, 8), (8, 2**29, 8), (8, 8, 2**29)]
LAYOUTS = [(x_k, w_k) for x_k in (True, False) for w_k in (True, False)]
TABLE = json.loads(_gemm_sm90_configs.TABLE.read_text())
BUILT = {
    "float16": (*_gemm_sm90_configs.CONFIGS, *_gemm_single_sm90.CONFIGS),
    "float32": _gemm_sm90_configs.TF32,
    "int8": _gemm_int8_sm90.CONFIGS,
}


def test_the_terms_of_a_product():
    config = Config(128, 256, 2, 4, cm=2)
    # 3 x 2 clusters of 256 x 256 on one pair of multiprocessors: six rounds of 7 steps of 64 halves
    assert terms(config, 600, 260, 2 * 400, 2, 3) == (1, 42, 12, 12, (860 * 800 + 600 * 260 * 2) / 1e6)
    assert terms(config, 600, 264, 2 * 400, 2, 12) == (1, 7, 2, 0, (864 * 800 + 600 * 264 * 2) / 1e6)
    assert terms(config, 600, 260, 2 * 400, 4, 12)[2:4] == (4, 0)
    divided = Single(64, 64, 1, 4, split=4)
    assert terms(divided, 64, 64, 1024, 2, 132)[:3] == (1, 2, 2)
    assert Costs(1, 10, 100, 1000, 0).us(config, 600, 260, 800, 2, 3) == 1 + 42 * 10 + 12 * 100 + 12 * 1000


@pytest.mark.parametrize(
    "config", list(dict.fromkeys(config for built in BUILT.values() for config in built)), ids=label
)
def test_a_label_is_read_as_the_configuration(config):
    assert labelled(label(config)) == config


def fitted(entries) -> dict:
    """As ``all_costs``, from these entries of a table."""
    costs: dict = {}
    for row in tune.fit(entries):
        known = costs.setdefault((row["gpu"], row["dtype"], row["layout"]), {})
        known[labelled(row["config"])] = Costs(**row["costs"])
    return costs


def test_the_costs_are_those_of_the_times_in_the_table():
    assert fitted(TABLE) == _gemm_sm90_configs.all_costs()


@pytest.mark.parametrize("dtype", BUILT)
def test_every_configuration_has_costs_in_the_layout_that_stands_for_all(dtype):
    assert _gemm_sm90_configs.all_costs()[H200, dtype, "nt"].keys() >= set(BUILT[dtype])


@pytest.mark.parametrize("key", _gemm_sm90_configs.all_costs(), ids=" ".join)
def test_the_one_of_least_cost_is_nearly_the_fastest(key, monkeypatch):
    """At shapes where all were timed, by costs that were fitted to the others."""
    timed = [e for e in TABLE if (e["gpu"], e["dtype"], e["layout"]) == key and "times" in e]
    slower, parts = [], 5
    for part in range(parts):
        costs = fitted(entry for i, entry in enumerate(timed) if i % parts != part)
        monkeypatch.setattr(_gemm_sm90_configs, "all_costs", lambda costs=costs: costs)
        for entry in timed[part::parts]:
            dtype = getattr(torch, entry["dtype"])
            options = (dtype, torch.bfloat16 if dtype == torch.int8 else dtype, H200, entry["multiprocessors"], key[2])
            chosen = fastest(map(labelled, entry["times"]), *entry["shape"], *options)
            slower.append(entry["times"][label(chosen)] / min(entry["times"].values()))
    assert len(slower) > 20
    assert max(slower) < 1.6  # int8; 1.36 at most in halves
    assert math.prod(slower) ** (1 / len(slower)) < 1.06  # int8; 1.04 at most in halves


def test_a_shape_of_the_table_has_the_configuration_that_was_the_fastest_there():
    for entry in TABLE:
        config, shape, dtype = entry["config"], entry["shape"], getattr(torch, entry["dtype"])
        config = Config(**config) if "group" in config else Single(**config)
        if dtype == torch.int8:
            chosen = _gemm_int8_sm90.choose(*shape, dtype, torch.bfloat16, entry["gpu"], 132)
            assert chosen == _gemm_int8_sm90.choose(*shape, _gemm_int8_sm90.FP8, torch.float16, entry["gpu"], 132)
        else:
            layout = _gemm_sm90_configs.k_major(entry["layout"])
            chosen = choose(*shape, dtype, *layout, entry["gpu"], 132)
            if dtype == torch.float16:
                assert chosen == choose(*shape, torch.bfloat16, *layout, entry["gpu"], 132)
        assert chosen == config


@pytest.mark.parametrize(("gpu", "multiprocessors"), [(H200, 132), ("NVIDIA H100 PCIe", 114), ("NVIDIA H20", 78)])
def test_every_shape_has_a_configuration_that_can_run_it(gpu, multiprocessors):
    for shape in SHAPES:
        for x_k, w_k in LAYOUTS:
            config = choose(*shape, torch.float16, x_k, w_k, gpu, multiprocessors)
            assert unwalked(config) in BUILT["float16"]
            assert config.suits(*shape)
            assert config.reads(x_k, w_k)
        assert unwalked(choose(*shape, torch.float32, True, True, gpu, multiprocessors)) in BUILT["float32"]
        for x, out in itertools.product((*_gemm_int8_sm90.INPUTS, _gemm_int8_sm90.FP8), _gemm_int8_sm90.OUTPUTS):
            if x == _gemm_int8_sm90.FP8 and out not in (torch.float16, torch.bfloat16, torch.float32):
                continue
            config = _gemm_int8_sm90.choose(*shape, x, out, gpu, multiprocessors)
            assert unwalked(config) in _gemm_int8_sm90.configs(x, out)


def test_fewer_multiprocessors_have_more_rounds():
    """The same product, large for a small card and small for a large one."""
    few, many = (choose(1000, 1024, 4096, torch.float16, True, True, "another", count) for count in (20, 400))
    assert few.bm * few.bn > many.bm * many.bn
