"""Quantization: a dense model in, a model in fewer bits out."""

from qsparse.quant.convert import DTYPES, quantize

__all__ = ["DTYPES", "quantize"]
