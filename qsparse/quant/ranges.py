"""Observers: they see the batches that reach one tensor, and give the range (lo, hi) that it is quantized over.

Each has ``see(x)`` for a tensor of any shape, and ``range()``, which always includes 0. They accumulate over all
batches, so what the first one holds does not decide.
"""

import warnings

import numpy as np
import torch
from torch import Tensor

from qsparse.quant.schemes import limits, scale_and_zero, to_grid, to_reals

_STEPS = 100  # fractions of the extremes that mse tries
_BINS = 2048  # of entropy's histogram, on each side of zero
_MOST_CUT = 0.01  # of the values, that entropy cuts off
_LACKING = 1e-4  # the probability of a bin that Q lacks


class CalibrationWarning(UserWarning):
    """The calibration data say little about what they were to measure; the message names the layer."""


class MinMax:
    """The smallest and the largest value seen. ValueError where a value is NaN or Inf."""

    def __init__(self) -> None:
        self.lo = self.hi = 0.0
        self.seen = 0

    def see(self, x: Tensor) -> None:
        if not x.numel():
            return
        lo, hi = (float(extreme) for extreme in torch.aminmax(x.detach()))
        if not (np.isfinite(lo) and np.isfinite(hi)):
            bad = int((~torch.isfinite(x)).sum())
            raise ValueError(f"{bad:,} of its values are NaN or Inf")
        self.lo, self.hi = min(self.lo, lo), max(self.hi, hi)
        self.seen += x.numel()

    def range(self) -> tuple[float, float]:
        """(lo, hi); ValueError if nothing was seen. Warns, and gives (-1, 1), if all was zeros."""
        if not self.seen:
            raise ValueError("no value was seen")
        if self.lo == self.hi == 0:
            warnings.warn("only zeros were seen; its range is taken to be [-1, 1]", CalibrationWarning, stacklevel=2)
            return -1.0, 1.0
        return self._range()

    def _range(self) -> tuple[float, float]:
        return self.lo, self.hi


class _Values(MinMax):
    """Keeps the values that it saw, in float32 on the CPU."""

    def __init__(self) -> None:
        super().__init__()
        self._parts: list[Tensor] = []

    def see(self, x: Tensor) -> None:
        super().see(x)
        self._parts.append(x.detach().float().flatten().cpu())

    @property
    def values(self) -> Tensor:
        return torch.cat(self._parts)


class Percentile(_Values):
    """The extremes, cut at ``±c`` where `percent` % of all ``|x|`` are at most c. Ignores NaN and Inf, with a warning.

    percent: in (0, 100]; of 100 this is `MinMax`.
    """

    def __init__(self, percent: float) -> None:
        super().__init__()
        self.percent = percent
        self.ignored = 0

    def see(self, x: Tensor) -> None:
        finite = torch.isfinite(x)
        self.ignored += x.numel() - int(finite.sum())
        super().see(x[finite])

    def range(self) -> tuple[float, float]:
        if self.ignored:
            warnings.warn(f"{self.ignored:,} values that are NaN or Inf were ignored", CalibrationWarning, stacklevel=2)
        return super().range()

    def _range(self) -> tuple[float, float]:
        cut = float(np.percentile(self.values.abs().numpy(), self.percent))
        if cut == 0:  # more zeros than the percentile leaves room for: nothing can be cut
            return self.lo, self.hi
        return max(self.lo, -cut), min(self.hi, cut)


class Mse(_Values):
    """The fraction of the extremes, of 1 %, 2 %, ... 100 %, whose rounding and clipping have the least mean square."""

    def __init__(self, bits: int | str, symmetric: bool) -> None:
        super().__init__()
        self.bits, self.symmetric = bits, symmetric

    def _range(self) -> tuple[float, float]:
        x = self.values
        fractions = [step / _STEPS for step in range(_STEPS, 0, -1)]
        best = min(fractions, key=lambda fraction: self._loss(x, fraction))  # the widest of equals
        return best * self.lo, best * self.hi

    def _loss(self, x: Tensor, fraction: float) -> float:
        lo, hi = (torch.tensor(fraction * extreme) for extreme in (self.lo, self.hi))
        scale, zero = scale_and_zero(lo, hi, self.bits, self.symmetric)
        back = to_reals(to_grid(x, scale, zero, self.bits, self.symmetric), scale, zero)
        return float((back - x).square().mean(dtype=torch.float64))


class Entropy(_Values):
    """The cut ``±c`` that keeps most of the distribution of x, by the Kullback-Leibler divergence.

    P is the histogram from -c to c with what lies beyond in its outer bins; Q is the same histogram without that,
    merged into the levels of the integers and spread evenly over the bins that are not empty. Zeros are exact at every
    scale, so they are left out. Unlike the source's, the histogram keeps the sign (of ``|x|``, a background of one
    negative value hides what is cut on the positive side), and at most 1 % is cut off: P and Q are alike, too, where
    nearly all lies in the outer bins.

    Source: S. Migacz, "8-bit Inference with TensorRT" (GTC 2017).
    """

    def __init__(self, bits: int) -> None:
        super().__init__()
        self.levels = 2**bits - 1

    def _range(self) -> tuple[float, float]:
        x = self.values.double().numpy()
        largest = max(-self.lo, self.hi)
        counts, edges = np.histogram(x[x != 0], bins=2 * _BINS + 1, range=(-largest, largest))
        sides = np.cumsum(counts[_BINS:] + counts[_BINS::-1]) - counts[_BINS]  # what the first so many bins hold
        least = max(self.levels // 2, int(np.searchsorted(sides, (1 - _MOST_CUT) * counts.sum())))
        halves = range(_BINS, min(least, _BINS) - 1, -1)
        best = min(halves, key=lambda half: divergence(counts, half, self.levels))  # the widest of equals
        cut = float(edges[_BINS + best + 1])
        return max(self.lo, -cut), min(self.hi, cut)


def divergence(counts: np.ndarray, half: int, levels: int) -> float:
    """KL(P || Q) in nats when of a histogram (an odd number of bins) the middle one and `half` a side are kept.

    levels: integers that they share, at most ``2 * half + 1``. Where Q has nothing in a bin of P it is given 0.0001:
    what is cut off may fall on an empty bin, which alone must not rule a cut out. Infinite if Q has nothing at all.
    """
    middle, bins = len(counts) // 2, 2 * half + 1
    kept = counts[middle - half : middle + half + 1].astype(np.float64)
    p = kept.copy()
    p[0] += counts[: middle - half].sum()
    p[-1] += counts[middle + half + 1 :].sum()
    starts = np.arange(levels) * bins // levels  # bins >= levels: each level has a bin at least
    filled = np.add.reduceat((kept > 0).astype(np.float64), starts)
    means = np.divide(np.add.reduceat(kept, starts), filled, out=np.zeros(levels), where=filled > 0)
    q = np.where(kept > 0, np.repeat(means, np.diff(starts, append=bins)), 0)
    if not q.any():
        return np.inf
    p, q = p / p.sum(), q / q.sum()
    q[(p > 0) & (q == 0)] = _LACKING
    p, q = p[p > 0], q[p > 0] / q.sum()
    return float((p * np.log(p / q)).sum())


class Lsq(MinMax):
    """Where a learned scale starts: ``s = 2 mean|x| / sqrt(Q_P)`` of the largest q, Q_P; so the range is ``±s Q_P``.

    Source: S. K. Esser et al., "Learned Step Size Quantization" (ICLR 2020), section 2.1.
    """

    def __init__(self, bits: int | str) -> None:
        super().__init__()
        self.largest = limits(bits)[1]
        self.total = 0.0

    def see(self, x: Tensor) -> None:
        super().see(x)
        self.total += float(x.detach().abs().sum(dtype=torch.float64))

    def _range(self) -> tuple[float, float]:
        end = 2 * self.total / self.seen * self.largest**0.5
        return -end, end


class Fixed:
    """A range given beforehand, widened to 0. It looks at nothing."""

    def __init__(self, lo: float, hi: float) -> None:
        self._given = min(lo, 0.0), max(hi, 0.0)

    def range(self) -> tuple[float, float]:
        return self._given
