"""Observers against what can be worked out by hand, and what they refuse."""

import math

import numpy as np
import pytest
import torch

from qsparse.quant.ranges import CalibrationWarning, Entropy, Fixed, MinMax, Mse, Percentile, divergence

OBSERVERS = {
    "minmax": MinMax,
    "percentile": lambda: Percentile(99.0),
    "mse": lambda: Mse(8, True),
    "entropy": lambda: Entropy(8),
}


def observed(observer, *batches):
    for batch in batches:
        observer.see(torch.as_tensor(batch, dtype=torch.float32))
    return observer.range()


@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
@pytest.mark.parametrize("sign", [1, -1])
def test_a_range_holds_zero_and_no_more_than_was_seen(make, sign):
    x = sign * torch.linspace(1, 5, 1000)
    lo, hi = observed(make(), x[:300], x[300:].reshape(7, 100))
    assert lo <= 0 <= hi
    assert max(-lo, hi) > 4
    assert max(-lo, hi) <= 5
    assert (lo == 0) == (sign == 1)


@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
def test_a_first_batch_of_zeros_decides_nothing(make):
    lo, hi = observed(make(), np.zeros(100), np.linspace(-1, 3, 300), np.zeros(0))
    assert lo == pytest.approx(-1, rel=0.05)
    assert hi == pytest.approx(3, rel=0.05)


@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
def test_only_zeros_warns_and_stays_usable(make):
    with pytest.warns(CalibrationWarning, match="only zeros were seen"):
        assert observed(make(), np.zeros(5)) == (-1, 1)


@pytest.mark.parametrize("make", OBSERVERS.values(), ids=OBSERVERS)
def test_nothing_seen_is_refused(make):
    with pytest.raises(ValueError, match="no value was seen"):
        make().range()


@pytest.mark.parametrize("make", [make for name, make in OBSERVERS.items() if name != "percentile"])
@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(make, value):
    with pytest.raises(ValueError, match="1 of its values are NaN or Inf"):
        make().see(torch.tensor([1.0, value, 2.0]))


def test_percentile_ignores_what_is_not_finite_and_says_so():
    with pytest.warns(CalibrationWarning, match="2 values that are NaN or Inf were ignored"):
        assert observed(Percentile(100), [1.0, math.nan, -2.0, math.inf]) == (-2, 1)


def test_percentile_cuts_both_ends_alike():
    x = np.arange(-100, 1001)
    cut = np.percentile(np.abs(x), 90)
    assert observed(Percentile(90), x) == (-100, cut)
    assert observed(Percentile(100), x) == (-100, 1000)
    assert observed(Percentile(5), x) == (-np.percentile(np.abs(x), 5), np.percentile(np.abs(x), 5))
    assert observed(Percentile(50), [0.0] * 9 + [3.0]) == (0, 3)  # a cut at 0 would leave nothing


@pytest.mark.parametrize("symmetric", [True, False])
def test_mse_is_the_best_of_a_hundred(symmetric):
    x = torch.cat([torch.randn(2000, generator=torch.Generator().manual_seed(1)), torch.tensor([40.0])])
    lo, hi = observed(Mse(4, symmetric), x)
    x = x.double().numpy()

    def loss(fraction):
        low, high = fraction * x.min(), fraction * x.max()
        scale = max(-low, high) / 7 if symmetric else (high - low) / 15
        zero = 0 if symmetric else np.rint(-low / scale)
        q = np.clip(np.rint(x / scale) + zero, *((-7, 7) if symmetric else (0, 15)))
        return np.square(scale * (q - zero) - x).mean()

    losses = {step / 100: loss(step / 100) for step in range(1, 101)}
    assert hi / x.max() == pytest.approx(lo / x.min())
    assert losses[round(hi / x.max(), 2)] == pytest.approx(min(losses.values()), rel=1e-5)
    assert hi < 0.9 * x.max()  # it does clip the outlier


def test_entropy_cuts_a_far_outlier_and_keeps_what_is_spread_evenly():
    bell = torch.randn(20_000, generator=torch.Generator().manual_seed(2))
    _, hi = observed(Entropy(8), bell, [60.0])
    assert 2 < hi < 20
    even = torch.linspace(-1, 1, 20_001)
    assert observed(Entropy(8), even)[1] > 0.95


def test_entropy_is_not_blinded_by_a_background():
    """MNIST's inputs: most are the one negative value of the background, the digits lie on the positive side."""
    digits = torch.linspace(0, 2.8, 2000)
    lo, hi = observed(Entropy(8), torch.full((8000,), -0.42), digits)
    assert lo == pytest.approx(-0.42)
    assert hi > 2.5


def test_divergence_by_hand():
    counts = np.array([1, 0, 3, 9, 1, 2, 4])  # the middle is 9
    # Two a side in five levels: P has the outer counts in its ends, and Q lacks the left one
    p, q = np.array([1, 3, 9, 1, 6]) / 20, np.array([1e-4, 3 / 15, 9 / 15, 1 / 15, 2 / 15]) / (1 + 1e-4)
    assert divergence(counts, 2, 5) == pytest.approx((p * np.log(p / q)).sum())
    assert divergence(np.array([1, 0, 0, 0, 1]), 1, 3) == np.inf
    # Seven bins in four levels: [0], [1, 2], [3, 4], [5, 6]
    p, q = np.array([1, 0, 3, 9, 1, 2, 4]) / 20, np.array([1, 0, 3, 5, 5, 3, 3]) / 20
    some = p > 0
    assert divergence(counts, 3, 4) == pytest.approx((p[some] * np.log(p[some] / q[some])).sum())
    assert divergence(counts, 3, 7) == 0


def test_fixed_is_what_was_given_with_zero():
    assert Fixed(-10, 10).range() == (-10, 10)
    assert Fixed(2, 5).range() == (0, 5)
    assert Fixed(-5, -2).range() == (-5, 0)
