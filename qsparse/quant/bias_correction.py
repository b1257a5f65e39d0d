"""Bias correction: rounding and pruning shift the mean of each output, and the bias can take that back.

Source: M. Nagel et al., "Data-Free Quantization Through Weight Equalization and Bias Correction" (ICCV 2019), section
4.2, with the means measured on calibration data (their appendix D).
"""

from torch import Tensor


def corrected_bias(bias: Tensor | None, exact: Tensor, compressed: Tensor) -> Tensor:
    """The bias (N,) with which the outputs of the compressed layer have the mean of the exact layer's.

    bias: (N,) or None. exact, compressed: (S, N), what the two layers give for the same images, before the activation.
    """
    shift = (exact.double() - compressed.double()).mean(dim=0)
    return (shift if bias is None else bias.double() + shift).float()
