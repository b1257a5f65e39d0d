"""fp4 (e2m1) and fp8 (e4m3): the numbers that there are, and what is simulated with them."""

import itertools
import math

import pytest
import torch

from qsparse.errors import UserError
from qsparse.models import MLP
from qsparse.quant import QuantConfig, quantize, schemes

ONE, ZERO = torch.ones(1), torch.zeros(1)
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]


def rounded(x, bits):
    return schemes.to_grid(torch.as_tensor(x), ONE, ZERO, bits)


def test_e2m1_by_hand():
    """Every number, every middle (which goes to the even mantissa, every other number), and beyond the largest."""
    assert rounded(E2M1, "e2m1").tolist() == E2M1
    for index, (below, above) in enumerate(itertools.pairwise(E2M1)):
        middle = (below + above) / 2
        assert rounded([middle], "e2m1").item() == (below if index % 2 == 0 else above)
        assert rounded([middle - 1e-3], "e2m1").item() == below
        assert rounded([-middle - 1e-3], "e2m1").item() == -above
    assert rounded([7.0, -100.0, math.inf], "e2m1").tolist() == [6, -6, 6]
    assert rounded([math.nan], "e2m1").isnan().all()


def test_e4m3_is_pytorch_s():
    bits = torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float()
    numbers = bits[torch.isfinite(bits)]
    assert torch.equal(rounded(numbers, "e4m3"), numbers)
    ordered = numbers.sort().values
    x = torch.cat([(ordered[1:] + ordered[:-1]) / 2, 500 * torch.randn(10_000), 0.01 * torch.randn(10_000)])
    x = x.clamp(-448, 448)
    assert torch.equal(rounded(x, "e4m3"), x.to(torch.float8_e4m3fn).float())
    assert schemes.limits("e4m3") == (-448, torch.finfo(torch.float8_e4m3fn).max)


@pytest.mark.parametrize("granularity", ["tensor", "channel", "group"])
def test_weights_reach_the_largest_number_and_zeros_stay(granularity):
    w = torch.randn(4, 100)
    w[1] = 0
    q, scale, zero = schemes.round_weights(w, "e2m1", granularity, 32)
    assert float(q.abs().max()) == 6
    assert set(q.abs().unique().tolist()) <= set(E2M1)
    assert not q[1].any()
    assert not zero.any()
    assert torch.isfinite(scale).all()


def test_floats_simulate_between_their_neighbours_in_bits():
    model, x = MLP((784, 40, 10), seed=1), torch.randn(200, 784)
    exact = model(x).detach()

    def error(dtype, **options):
        return float((quantize(model, QuantConfig(dtype, simulate=True, **options), x)(x) - exact).norm())

    assert error("int8") < error("fp8") < error("int4")
    assert error("int4wo") < error("fp4wo") < error("int3wo")  # of even weights: an integer's steps suit them
    assert error("fp4wo") < error("fp4")
    assert error("fp4wo", method="gptq") < error("fp4wo")
    assert error("fp8", activations="static", calibration="minmax") < error("int4")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "fp4 has no kernel: add --simulate"),
        ({"simulate": True, "symmetric": False}, "fp4 is a float, which has its sign and no zero point"),
        ({"simulate": True, "activations": "static", "calibration": "entropy"}, "entropy is of even steps"),
    ],
)
def test_what_a_float_has_not(options, message):
    with pytest.raises(UserError, match=message):
        QuantConfig("fp4", **options)
