"""The host side of ``gemm_24_sm80.cu`` and ``gemm_int8_24_sm80.cu``: which operands they take, and the launch.

The faces are :mod:`qsparse.kernels.gemm_24` and :mod:`qsparse.kernels.gemm_int8_24`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from qsparse.kernels import _two_four
from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._gemm_int8_epilogue import FORMAT, OUT_DTYPES, Epilogue
from qsparse.kernels._load import launch, multiprocessors

SOURCE, INT8_SOURCE = "gemm_24_sm80.cu", "gemm_int8_24_sm80.cu"
_INPUTS = {torch.int8: "signed char", torch.uint8: "unsigned char"}
_HALVES = (torch.float16, torch.bfloat16)
_GROUP_ROWS = 2048  # batch rows that blocks running together cover


@dataclass(frozen=True)
class Config:
    """A tile of ``gemm_24_sm80.cuh``: ``bo x bb`` outputs by batch rows a block, ``wo x wb`` a warp."""

    bo: int
    bb: int
    wo: int
    wb: int
    stages: int

    @property
    def threads(self) -> int:
        """Threads a block."""
        return 32 * (self.bo // self.wo) * (self.bb // self.wb)

    @property
    def shared(self) -> int:
        """Dynamic shared memory a block, in bytes."""
        return self.stages * (self.bb * 128 + self.bo * 64)

    def tiles(self, m: int, n: int) -> int:
        """Tiles of an (m, n) product."""
        return -(-n // self.bo) * -(-m // self.bb)

    @property
    def sizes(self) -> str:
        """The template arguments after the types."""
        return f"{self.bo}, {self.bb}, {self.wo}, {self.wb}, {self.stages}"


CONFIGS = (Config(128, 128, 64, 32, 3), Config(64, 64, 32, 32, 3))
INSTANCES = tuple(
    f"gemm_24_sm80<{C_FLOATS[x]}, {C_FLOATS[out]}, {c.sizes}>"
    for c in CONFIGS
    for x in _HALVES
    for out in (x, torch.float32)
)
INT8_INSTANCES = tuple(f"gemm_int8_24_sm80<{_INPUTS[x]}, {c.sizes}>" for c in CONFIGS for x in _INPUTS)


def supports(x: torch.Tensor, n: int, out: torch.dtype) -> bool:
    """Whether the tier takes activations like these for ``n`` outputs: K in whole slices of 32, no float32."""
    m, k = x.shape
    tiles = CONFIGS[-1].tiles(m, n)
    return x.dtype != torch.float32 and k % 32 == 0 and out in OUT_DTYPES and out != torch.int64 and tiles < 2**31


def launch_gemm(
    x: torch.Tensor,
    values: torch.Tensor,
    metadata: torch.Tensor,
    y: torch.Tensor,
    epilogue: Epilogue | tuple[torch.Tensor | None, bool],
    config: Config | None = None,
) -> None:
    """Write the product of ``x`` (M, K) and the 2:4 matrix (N, K) into ``y`` (M, N), row-major.

    ``epilogue`` is that of ``gemm_int8``, or (bias, relu) for floats; ``config`` None takes the bigger tile where it
    fills the multiprocessors.
    """
    (m, k), n = x.shape, values.shape[0]
    x = _two_four.on_boundaries(x)
    values, metadata = (_two_four.kept(a, _two_four.on_boundaries) for a in (values, metadata))
    if config is None:
        config = CONFIGS[CONFIGS[0].tiles(m, n) < multiprocessors(x.device.index)[1]]
    group = max(1, _GROUP_ROWS // config.bb)
    operands = (x.data_ptr(), x.stride(0), values.data_ptr(), values.stride(0), metadata.data_ptr(), metadata.stride(0))
    if isinstance(epilogue, Epilogue):
        source, instance = INT8_SOURCE, f"gemm_int8_24_sm80<{_INPUTS[x.dtype]}, {config.sizes}>"
        formats = f"PqPqPqP{FORMAT}iiii"
        arguments: tuple = (*operands, y.data_ptr(), epilogue.pack(y.dtype), m, n, k, group)
    else:
        bias, relu = epilogue
        source, instance = SOURCE, f"gemm_24_sm80<{C_FLOATS[x.dtype]}, {C_FLOATS[y.dtype]}, {config.sizes}>"
        formats = "PqPqPqPPiiiii"
        arguments = (*operands, 0 if bias is None else bias.data_ptr(), y.data_ptr(), m, n, k, relu, group)
    grid = config.tiles(m, n)
    launch(x.device, source, instance, formats, arguments, grid=grid, block=config.threads, shared=config.shared)
