"""Scales and zero points against the formulas and PyTorch's observers."""

import numpy as np
import pytest
import torch

from qsparse import kernels
from qsparse.quant import config, schemes


def back(w, bits, granularity, group=64, symmetric=True):
    q, scale, zero = schemes.round_weights(w, bits, granularity, group, symmetric)
    s, z = (schemes.spread(value, w, granularity, group) for value in (scale, zero))
    return q, s, schemes.to_reals(q, s, z)


@pytest.mark.parametrize("bits", range(2, 9))
@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", config.GRANULARITIES)
def test_rounding_is_off_by_half_a_step_at_most(bits, symmetric, granularity):
    w = torch.randn(6, 150, generator=torch.Generator().manual_seed(bits))
    q, s, rounded = back(w, bits, granularity, 64, symmetric)
    lo, hi = schemes.limits(bits, symmetric)
    assert (float(q.min()), float(q.max())) == (lo, hi) or symmetric  # symmetric: one of the two ends
    assert float(q.abs().max()) == hi
    assert torch.equal(q, q.round())
    allowed = 0.501 if symmetric else 1.001  # the rounded zero point may clip half a step off one end
    assert bool(((rounded - w).abs() <= allowed * s).all())


def test_int8_by_channel_is_what_the_kernel_computes():
    w = torch.randn(33, 70)
    w[3] = 0
    w[4] = 1e-42
    q, scale, zero = schemes.round_weights(w, 8)
    kernel_q, kernel_scale = kernels.quantize_rows(w)
    assert torch.equal(q, kernel_q.float())
    assert torch.equal(scale[:, 0], kernel_scale)
    assert not zero.any()


@pytest.mark.filterwarnings("ignore")  # PyTorch says that its observers will move to another package
def test_int8_by_channel_is_what_pytorch_s_observer_gives():
    from torch.ao.quantization import PerChannelMinMaxObserver

    w = torch.randn(40, 100)
    observer = PerChannelMinMaxObserver(
        ch_axis=0, dtype=torch.qint8, qscheme=torch.per_channel_symmetric, quant_min=-127, quant_max=127
    )
    observer(w)
    scale, zero = observer.calculate_qparams()
    peer = torch.quantize_per_channel(w, scale.double(), zero, 0, torch.qint8).int_repr()
    assert torch.equal(schemes.round_weights(w, 8)[0].to(torch.int8), peer)


def test_the_last_group_is_short():
    w = torch.randn(5, 784)  # 784 = 6 * 128 + 16
    q, scale, _ = schemes.round_weights(w, 4, "group", 128)
    assert scale.shape == (5, 7)
    torch.testing.assert_close(scale[:, 6], w[:, 768:].abs().amax(dim=1) / 7)
    by_hand = torch.cat([schemes.round_weights(part, 4, "channel")[0] for part in w.split(128, dim=1)], dim=1)
    assert torch.equal(q, by_hand)
    assert torch.equal(schemes.round_weights(w, 4, "group", 9999)[0], schemes.round_weights(w, 4, "channel")[0])


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("granularity", config.GRANULARITIES)
def test_zeros_stay_zeros(granularity, symmetric):
    w = torch.randn(4, 130)
    w[2] = 0
    _, _, rounded = back(w, 4, granularity, 64, symmetric)
    assert not rounded[2].any()
    assert not back(torch.zeros(4, 130), 4, granularity, 64, symmetric)[2].any()
    assert schemes.round_weights(torch.zeros(4, 0), 4, granularity, 64, symmetric)[0].shape == (4, 0)


def test_asymmetric_by_hand():
    scale, zero = schemes.scale_and_zero(torch.tensor([-1.0]), torch.tensor([4.0]), 2, symmetric=False)
    np.testing.assert_allclose((scale.item(), zero.item()), (5 / 3, 1))  # rint(0.6)
    q = schemes.to_grid(torch.tensor([-9.0, -1.0, 0.0, 4.0, 9.0]), scale, zero, 2, symmetric=False)
    assert q.tolist() == [0, 0, 1, 3, 3]
    assert schemes.to_reals(q, scale, zero)[2] == 0


def test_a_range_always_holds_zero_and_may_be_as_wide_as_float32():
    for symmetric in (True, False):
        scale, zero = schemes.scale_and_zero(torch.tensor([2.0]), torch.tensor([3.0]), 8, symmetric)
        assert schemes.to_reals(schemes.to_grid(torch.zeros(1), scale, zero, 8, symmetric), scale, zero) == 0
        scale, zero = schemes.scale_and_zero(torch.tensor([-3e38]), torch.tensor([3e38]), 8, symmetric)
        assert torch.isfinite(scale).all()
        assert torch.isfinite(zero).all()
