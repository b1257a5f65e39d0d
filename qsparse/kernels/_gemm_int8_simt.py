"""The host side of ``gemm_int8_simt.cu``, which takes everything.

The face of the operation is :mod:`qsparse.kernels.gemm_int8`.
"""

from __future__ import annotations

import torch

from qsparse.kernels._gemm_int8_epilogue import FORMAT, Epilogue
from qsparse.kernels._load import launch

SOURCE = "gemm_int8_simt.cu"
BM = BN = 64  # the kernel's tile
BLOCK = 256
_C = {torch.int8: "signed char", torch.uint8: "unsigned char"}


def _instance(dtype: torch.dtype, wide: bool, words: bool) -> str:
    return f"gemm_int8_simt<{_C[dtype]}, {'long long' if wide else 'int'}, {str(words).lower()}>"


INSTANCES = tuple(_instance(dtype, wide, words) for dtype in _C for wide in (False, True) for words in (False, True))


def launch_gemm(
    x: torch.Tensor, ldx: int, w: torch.Tensor, ldw: int, y: torch.Tensor, epilogue: Epilogue, *, wide: bool = False
) -> None:
    """Write the product of ``x`` (M, K) int8 or uint8 and ``w`` (N, K) int8 into ``y`` (M, N), row-major.

    ``ldx`` and ``ldw`` are the strides of rows in bytes, ``wide`` says that sums may leave int32.
    """
    (m, k), n = x.shape, w.shape[0]
    words = (ldx | ldw | x.data_ptr() | w.data_ptr()) % 4 == 0
    launch(
        x.device,
        SOURCE,
        _instance(x.dtype, wide, words),
        f"PqPqPqqq{FORMAT}",
        (x.data_ptr(), ldx, w.data_ptr(), ldw, y.data_ptr(), m, n, k, epilogue.pack(y.dtype)),
        grid=-(-m // BM) * -(-n // BN),
        block=BLOCK,
    )
