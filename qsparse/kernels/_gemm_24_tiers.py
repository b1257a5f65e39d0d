"""The choice of a tier for products with 2:4 weights."""

from __future__ import annotations

import torch

from qsparse.kernels import _gemm_24_sm80, _gemm_24_sm90
from qsparse.kernels._face import pick_tier

_TIERS = {"sm90": _gemm_24_sm90, "sm80": _gemm_24_sm80}  # best first


def pick(asked: str | None, best: str, x: torch.Tensor, n: int, out: torch.dtype):
    """The module to launch: of the best tier that this GPU has and these arrays allow, or of the one asked for.

    None is the tier "simt", which has no kernel for the product, or "cpu". Raises ValueError for a tier that is not
    possible.
    """
    served = list(_TIERS)[list(_TIERS).index(best) :] if best in _TIERS else []
    possible = [*(name for name in served if _TIERS[name].supports(x, n, out)), "simt"]
    return _TIERS.get(pick_tier(asked, possible, x.device))
