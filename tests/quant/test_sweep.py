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
    assert {"dtype", "calibration", "calibration-samples", "percentile", "granularity", "group", "method"} <= set(SWEPT)
    assert not {"range", "simulate", "symmetric"} & set(SWEPT)


@pytest.mark.parametrize(
    ("lists", "message"),
    [
        (["colour=red"], "give OPTION=VALUE,VALUE with OPTION one of dtype, activations, calibration"),
        (["range=1,2"], "give OPTION=VALUE,VALUE"),
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
