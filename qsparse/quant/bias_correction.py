"""Bias correction: rounding shifts the mean of each output, and the bias can take that back.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section
4.2, with the means measured on calibration data (their appendix D).
"""

from torch import Tensor


def corrected_bias(bias: Tensor | None, exact: Tensor, quantized: Tensor) -> Tensor:
    """The bias (N,) with which the outputs of the quantized layer have the mean of the exact layer's.

    bias: (N,) or None. exact, quantized: (S, N), what the two layers give on the same inputs, before the activation.
    """
    shift = (exact.double() - quantized.double()).mean(dim=0)
    return (shift if bias is None else bias.double() + shift).float()
