"""Quantization: a dense model in, a model in fewer bits out."""

from qsparse.quant.config import DTYPES, SIMULATED, QuantConfig
from qsparse.quant.convert import quantize
from qsparse.quant.ranges import CALIBRATIONS, CalibrationWarning

__all__ = ["CALIBRATIONS", "DTYPES", "SIMULATED", "CalibrationWarning", "QuantConfig", "quantize"]
