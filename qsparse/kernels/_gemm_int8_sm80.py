"""The host side of ``gemm_int8_sm80.cu``: which operands it takes, which tile suits a shape, and the launch.

The face of the operation is :mod:`qsparse.kernels.gemm_int8`; it hands over what :func:`supports` accepts.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsparse.kernels import _gemm_sm80
from qsparse.kernels._gemm_int8_epilogue import FORMAT, OUT_DTYPES, Epilogue
from qsparse.kernels._gemm_sm80 import GROUP_ROWS, SPLITS, choose, limits
from qsparse.kernels._load import launch

SOURCE = "gemm_int8_sm80.cu"
_C = {torch.int8: "signed char", torch.uint8: "unsigned char"}
_SUM = "gemm_int8_sm80_sum"
_SUM_BLOCK = 256
_RATE = 3000.0  # multiply-adds/ns of a multiprocessor: twice those of 16-bit values


@dataclass(frozen=True)
class Config(_gemm_sm80.Config):
    """A tile of ``gemm_int8_sm80.cu``: as that of ``gemm_sm80.cu``, of elements of one byte."""

    size: int = 1

    @property
    def epilogue(self) -> int:
        """Bytes of shared memory that the epilogue needs, of those that the slices leave."""
        return self.bn * 12 + self.warps * min(self.wm, 32) * (self.wn * 4 + 16)

    def instance(self, dtype: torch.dtype) -> str:
        """The C++ name of the kernel for activations of this type."""
        return f"gemm_int8_sm80<{_C[dtype]}, {self.sizes}>"


# Tiles of gemm_sm80.cu, as many bytes deep (the second fits cards with 99 KB a block), and one of few rows.
# Speeds: NVIDIA H200, 4096³, 2026-11-30.
CONFIGS = (
    Config(128, 256, 128, 64, 64, 3, speed=1.0),
    Config(128, 256, 64, 64, 64, 4, speed=0.99),
    Config(64, 64, 128, 32, 32, 3, speed=0.69),
    Config(16, 128, 128, 16, 32, 4, speed=0.42),
)
INSTANCES = (*(config.instance(dtype) for config in CONFIGS for dtype in _C), _SUM)


def supports(x: torch.Tensor, ldx: int, w: torch.Tensor, ldw: int, y: torch.Tensor) -> bool:
    """Whether the kernel can read these operands and write this output, given as :func:`launch_gemm` takes them.

    It copies aligned chunks of 16 bytes, so K, the addresses, ``ldx`` and ``ldw`` must be multiples of 16.
    """
    (m, k), n = x.shape, w.shape[0]
    return (
        (k | ldx | ldw | x.data_ptr() | w.data_ptr()) % 16 == 0
        and y.dtype in OUT_DTYPES
        and y.dtype != torch.int64
        and max(m, n, k) < 2**31 - 512  # the kernel counts rows and columns in 32 bits, tiles rounded up
        and CONFIGS[-1].tiles(m, n) * SPLITS[-1] < 2**31
    )


def launch_gemm(
    x: torch.Tensor,
    ldx: int,
    w: torch.Tensor,
    ldw: int,
    y: torch.Tensor,
    epilogue: Epilogue,
    *,
    config: Config | None = None,
    split: int | None = None,
    group: int | None = None,
) -> None:
    """Write the product of ``x`` (M, K) int8 or uint8 and ``w`` (N, K) int8 into ``y`` (M, N), row-major.

    ``ldx`` and ``ldw`` are the strides of rows in bytes. The tile, the number of blocks that share a tile and divide
    K, and how many rows of tiles run together are chosen by shape and device where None. See :func:`supports`.
    """
    (m, k), n = x.shape, w.shape[0]
    if config is None:
        config, best_split = choose(m, n, k, *limits(x.device.index), CONFIGS, _RATE)
        split = split or best_split
    split = split or 1
    sums = torch.empty((split, m, n), dtype=torch.int32, device=x.device) if split > 1 else None
    addresses = (x.data_ptr(), ldx, w.data_ptr(), ldw, y.data_ptr(), 0 if sums is None else sums.data_ptr())
    packed = epilogue.pack(y.dtype)
    launch(
        x.device,
        SOURCE,
        config.instance(x.dtype),
        f"PqPqPP{FORMAT}iiiii",
        (*addresses, packed, m, n, k, group or max(1, GROUP_ROWS // config.bm), split),
        grid=config.tiles(m, n) * split,
        block=32 * config.warps,
        shared=config.shared,
    )
    if sums is not None:
        launch(
            x.device,
            SOURCE,
            _SUM,
            f"PP{FORMAT}qii",
            (sums.data_ptr(), y.data_ptr(), packed, m, n, split),
            grid=-(-m * n // _SUM_BLOCK),
            block=_SUM_BLOCK,
        )
