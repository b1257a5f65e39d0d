"""What the weights that share a scale are quantized over. What lies beyond is clipped.

Observers of activations (ranges.py) see one batch after the other; weights are all there, so each set of them that
shares a scale is looked at on its own, and all sets at once: rows (R, C) -> lo, hi (R,).
"""

import functools

import torch
from torch import Tensor

from qsparse.quant.config import QuantConfig
from qsparse.quant.ranges import Entropy, Fixed
from qsparse.quant.schemes import Extremes, limits, minmax, scale_and_zero, to_grid, to_reals

_STEPS = 100  # fractions of the extremes that mse tries


def extremes(config: QuantConfig) -> Extremes:
    """The function that `config.weight_calibration` names."""
    return {
        "minmax": lambda: minmax,
        "percentile": lambda: functools.partial(percentile, percent=config.weight_percentile),
        "mse": lambda: functools.partial(mse, bits=config.bits, symmetric=config.symmetric_weights),
        "entropy": lambda: functools.partial(entropy, bits=config.bits),
        "fixed": lambda: functools.partial(fixed, between=config.weight_range),
        "lsq": lambda: functools.partial(lsq, bits=config.bits),
    }[config.weight_calibration]()


def percentile(rows: Tensor, percent: float) -> tuple[Tensor, Tensor]:
    """The extremes, cut at ``±c`` where `percent` % of a row's ``|w|`` are at most c, interpolated. c = 0 cuts nothing.

    percent: in (0, 100].
    """
    lo, hi = minmax(rows)
    ordered = rows.abs().sort(dim=1).values
    at = percent / 100 * (rows.shape[1] - 1)
    below, above = ordered[:, int(at)], ordered[:, min(int(at) + 1, rows.shape[1] - 1)]
    cut = torch.lerp(below, above, at - int(at))
    cut = torch.where(cut > 0, cut, torch.inf)
    return torch.maximum(lo, -cut), torch.minimum(hi, cut)


def mse(rows: Tensor, bits: int | str, symmetric: bool) -> tuple[Tensor, Tensor]:
    """The fraction of the extremes, of 1 %, 2 %, ... 100 %, whose rounding and clipping have the least mean square."""
    lo, hi = minmax(rows)
    best, least = torch.ones_like(lo), torch.full_like(lo, torch.inf)
    for step in range(_STEPS, 0, -1):
        fraction = step / _STEPS
        scale, zero = (value[:, None] for value in scale_and_zero(fraction * lo, fraction * hi, bits, symmetric))
        loss = (to_reals(to_grid(rows, scale, zero, bits, symmetric), scale, zero) - rows).square().sum(dim=1)
        best = torch.where(loss < least, fraction, best)  # the widest of equals
        least = torch.minimum(loss, least)
    return best * lo, best * hi


def entropy(rows: Tensor, bits: int) -> tuple[Tensor, Tensor]:
    """The cut of `ranges.Entropy`, of each row; one that is all zeros has nothing to cut."""
    lo, hi = minmax(rows)
    for index in ((lo != 0) | (hi != 0)).nonzero()[:, 0].tolist():
        observer = Entropy(bits)
        observer.see(rows[index])
        lo[index], hi[index] = observer.range()
    return lo, hi


def fixed(rows: Tensor, between: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """The limits given beforehand, widened to 0."""
    lo, hi = Fixed(*between).range()
    return rows.new_full((len(rows),), lo), rows.new_full((len(rows),), hi)


def lsq(rows: Tensor, bits: int | str) -> tuple[Tensor, Tensor]:
    """What a learned scale starts from: see `ranges.Lsq`."""
    end = 2 * rows.abs().mean(dim=1) * limits(bits)[1] ** 0.5
    return -end, end
