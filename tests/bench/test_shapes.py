import pytest

from qsparse.bench.shapes import CPU_SHAPES, GPU_SHAPES, GPU_TUNED, LARGEST, parse_shape, parse_sizes
from qsparse.errors import UserError


@pytest.mark.parametrize(("text", "shape"), [("4096,1024,784", (4096, 1024, 784)), (" 1, 2 ,3", (1, 2, 3))])
def test_a_shape_is_three_integers(text, shape):
    assert parse_shape(text) == shape


@pytest.mark.parametrize(
    "text", ["", "4096", "1,2", "1,2,3,4", "0,1,1", "-1,2,3", "a,b,c", "1.5,2,3", "1_0,2,3", "1;2;3", "1,2,2147483648"]
)
def test_anything_else_is_refused_with_what_came(text):
    with pytest.raises(UserError, match="--shapes") as error:
        parse_shape(text)
    assert repr(text) in str(error.value)


@pytest.mark.parametrize(("text", "sizes"), [("784,10", (784, 10)), ("784, 256,10", (784, 256, 10))])
def test_a_network_is_two_widths_or_more(text, sizes):
    assert parse_sizes(text) == sizes


@pytest.mark.parametrize("text", ["1,2,2147483648", "99999999999,1,1"])
def test_what_no_int32_holds_is_refused_with_what_is_allowed(text):
    for parse in (parse_shape, parse_sizes):
        with pytest.raises(UserError, match=r"from 1 to 2\^31 - 1"):
            parse(text)


@pytest.mark.parametrize("text", ["", "784", "784,0,10", "784,x", "784,1_0", "784;10"])
def test_any_other_network_is_refused_with_what_came(text):
    with pytest.raises(UserError, match="--network") as error:
        parse_sizes(text)
    assert repr(text) in str(error.value)


def test_no_shape_is_listed_twice():
    for shapes in (GPU_SHAPES, CPU_SHAPES, GPU_TUNED):
        assert len(set(shapes)) == len(shapes)
    assert LARGEST in GPU_SHAPES
