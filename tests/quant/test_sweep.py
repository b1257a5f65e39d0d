import dataclasses

import pytest

from qsparse.errors import UserError
from qsparse.quant import QuantConfig
from qsparse.quant.sweep import SWEPT, sweep


def test_all_combinations_in_order():
    lists = ["dtype=int4wo,int3wo", "group=32,64"]
    assert sweep({"simulate": True, "granularity": "group"}, lists) == [
        QuantConfig(dtype, simulate=True, granularity="group", group=group)
        for dtype in ("int4wo", "int3wo")
        for group in (32, 64)
    ]
    assert sweep({"dtype": "fp16"}, []) == [QuantConfig("fp16")]


def test_what_comes_to_the_same_counts_once():
    assert len(sweep({"simulate": True}, ["granularity=channel,group", "group=32,64"])) == 3


def test_what_can_be_swept():
    """Every option but the layers, whose own commas a list could not tell from its own."""
    assert set(SWEPT) == {field.name.replace("_", "-") for field in dataclasses.fields(QuantConfig)} - {"layers"}
    static = {"activations": "static", "calibration": "fixed"}
    swept = sweep(static, ["range=-1:1,-10:10", "weight-calibration=mse", "simulate=yes", "symmetric=no,yes"])
    assert [(config.range, config.symmetric) for config in swept] == [
        ((-1, 1), False), ((-1, 1), True), ((-10, 10), False), ((-10, 10), True)
    ]  # fmt: skip
    assert [config.lr for config in sweep({}, ["qat-epochs=2", "lr=0.1,0.01"])] == [0.1, 0.01]


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["colour=red"], "give OPTION=VALUE,VALUE with OPTION one of dtype, activations, calibration"),
        (["layers=fc1"], "give OPTION=VALUE,VALUE"),
        (["range=1,2"], "'1' is no number of --range, or no LO:HI"),
        (["range=1:2:3"], "'1:2:3' is no number of --range"),
        (["simulate=true"], "simulate is yes or no, not 'true'"),
        (["lr=fast"], "'fast' is no number of --lr"),
        (["group"], "give OPTION=VALUE,VALUE"),
        (["group=32,many"], "'many' is no number of --group"),
        (["percentile=x"], "'x' is no number of --percentile"),
        (["method=gptq", "method=absmax"], "method is swept already"),
        (["method=gptq,magic"], "Unknown method 'magic'"),
        (["calibration=minmax"], "give --activations static too"),
    ],
)
def test_mistakes_are_sentences(lists, message):
    with pytest.raises(UserError, match=message):
        sweep({}, lists)
