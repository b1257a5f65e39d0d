"""Quantization: a dense model in, a model in fewer bits out.

Importing this imports no torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from qsparse.quant.config import CALIBRATIONS, DTYPES, SIMULATED, QuantConfig

if TYPE_CHECKING:
    from qsparse.quant.convert import quantize
    from qsparse.quant.qat import train_quantized
    from qsparse.quant.ranges import CalibrationWarning

__all__ = ["CALIBRATIONS", "DTYPES", "SIMULATED", "CalibrationWarning", "QuantConfig", "quantize", "train_quantized"]


_PLACES = {"quantize": "convert", "train_quantized": "qat", "CalibrationWarning": "ranges"}


def __getattr__(name: str) -> Any:
    if name not in _PLACES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_PLACES[name]}"), name)
