"""Training settings: what is refused, and the way to disk and back."""

import json
import math

import pytest

from qsparse.errors import UserError
from qsparse.train import TrainConfig


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("hidden", (256, 0)),
        ("hidden", (-1,)),
        ("epochs", 0),
        ("batch_size", 0),
        ("lr", 0.0),
        ("lr", -0.1),
        ("lr", math.nan),
        ("lr", math.inf),
        ("lr", 1e39),
        ("momentum", 1.0),
        ("momentum", -0.1),
        ("momentum", math.nan),
        ("weight_decay", -1e-4),
        ("weight_decay", math.inf),
        ("weight_decay", 1e39),
        ("seed", -1),
        ("validation", -1),
        ("hidden", (10**30,)),
        ("hidden", (1.5,)),
        ("hidden", 33),
        ("hidden", None),
        *((field, value) for field in ("lr", "momentum", "weight_decay") for value in ("x", None, True)),
        ("hidden", "33"),
        ("epochs", 2**31),
        ("epochs", True),
        ("epochs", 1.5),
        ("batch_size", 10**30),
        ("batch_size", "64"),
        ("seed", 2**63),
        ("seed", 1.5),
        ("validation", 2.5),
        ("validation", 10**30),
        ("device", 5),
        ("data", None),
        ("backend", "jax"),
        ("precision", "fp8"),
    ],
)
def test_a_value_out_of_range_is_refused_by_the_name_of_its_option(field, value):
    with pytest.raises(UserError, match=f"--{field.replace('_', '-')} is "):
        TrainConfig(**{field: value})


def test_settings_survive_json():
    config = TrainConfig(hidden=[320, 160], lr=0.05, validation=0, data="mnist-5k")
    assert TrainConfig.from_json(json.loads(json.dumps(config.to_json()))) == config
    assert config.hidden == (320, 160)


def test_the_default_recipe():
    config = TrainConfig()
    assert (config.hidden, config.epochs, config.batch_size, config.lr) == ((256,), 5, 64, 0.1)
    assert (config.momentum, config.weight_decay, config.seed) == (0, 0, 0)
