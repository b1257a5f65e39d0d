"""Quantization: a dense model in, a model in fewer bits out.

Importing this imports no torch: what needs it is loaded when it is first asked for.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from qsparse.quant.config import CALIBRATIONS, DTYPES, SIMULATED, QuantConfig

if TYPE_CHECKING:
    from qsparse.quant.convert import quantize
    from qsparse.quant.ranges import CalibrationWarning

__all__ = ["CALIBRATIONS", "DTYPES", "SIMULATED", "CalibrationWarning", "QuantConfig", "quantize"]


def __getattr__(name: str) -> Any:
    if name == "quantize":
        from qsparse.quant.convert import quantize

        return quantize
    if name == "CalibrationWarning":
        from qsparse.quant.ranges import CalibrationWarning

        return CalibrationWarning
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
