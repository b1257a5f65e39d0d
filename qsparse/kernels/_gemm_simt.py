"""Launch the matrix product of the plain floating-point units: which tile, how many slices of K.

Private to :mod:`qsparse.kernels.gemm`, which checks the arguments.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch

from qsparse.kernels._face import C_FLOATS
from qsparse.kernels._load import launch, multiprocessors

SOURCE = "gemm_simt.cu"
_BOOL = ("false", "true")
_PLAIN_TILE, _PLAIN_THREADS = 64, 256  # of the general rung
_SUM_THREADS = 256
_MAX_WORKSPACE = 32 * 2**20  # bytes, so that the slices' sums stay in the L2 cache of a large card


@dataclass(frozen=True)
class Config:
    """One tile of ``gemm_simt_tiles``; the names are the kernel's.

    ``blocks`` is how many blocks an SM must have registers for; ``efficiency`` is the share of the multiply-add rate
    that full SMs reach with this tile, relative to the best tile.
    """

    bm: int
    bn: int
    bk: int
    tm: int
    tn: int
    blocks: int
    efficiency: float = 1.0

    def __post_init__(self):
        if self.bm % (4 * self.tm) or self.bn % (8 * self.tn) or self.tm % 4 or self.tn % 4:
            raise ValueError(f"{self}: the tile must be a grid of warps of 4 x 8 patches made of 4 x 4 pieces")
        if self.bk % 8 or self.bm * self.bk // 4 % self.threads or self.bn * self.bk // 4 % self.threads:
            raise ValueError(f"{self}: every thread must copy the same number of vectors, in columns of 8 steps of k")
        if self.shared > 64 * 1024:
            raise ValueError(f"{self}: {self.shared} bytes of shared memory a block; compute capability 7.5 has 65536")

    @property
    def threads(self) -> int:
        return self.bm // self.tm * (self.bn // self.tn)

    @property
    def shared(self) -> int:
        """Bytes of dynamic shared memory: two slices of both operands, each row four floats longer than the tile."""
        return 2 * self.bk * (self.bm + self.bn + 8) * 4

    def instance(self, x_k_major: bool, w_k_major: bool) -> str:
        numbers = ", ".join(map(str, (self.bm, self.bn, self.bk, self.tm, self.tn, self.blocks)))
        return f"gemm_simt_tiles<{numbers}, {_BOOL[x_k_major]}, {_BOOL[w_k_major]}>"


CONFIGS = (
    Config(256, 128, 8, 16, 8, 1, 1.0),
    Config(128, 128, 8, 16, 8, 2, 0.97),
    Config(64, 128, 16, 8, 8, 3, 0.85),
    Config(64, 64, 16, 8, 4, 4, 0.7),
    Config(32, 64, 16, 4, 4, 4, 0.5),
    Config(16, 128, 16, 4, 8, 6, 0.65),
)


def _plain_instance(dtype: torch.dtype, out: torch.dtype, x_k_major: bool, w_k_major: bool) -> str:
    return f"gemm_simt<{C_FLOATS[dtype]}, {C_FLOATS[out]}, {_BOOL[x_k_major]}, {_BOOL[w_k_major]}>"


INSTANCES = (
    *(
        _plain_instance(dtype, out, x, w)
        for dtype in (torch.float16, torch.bfloat16)
        for out in (dtype, torch.float32)
        for x in (True, False)
        for w in (True, False)
    ),
    *(config.instance(x, w) for config in CONFIGS for x in (True, False) for w in (True, False)),
    "gemm_simt_sum",
)


@functools.lru_cache(maxsize=4096)
def plan(m: int, n: int, k: int, sms: int) -> tuple[Config, int]:
    """The tile and the number of slices of K with the smallest estimate for a card with ``sms`` multiprocessors."""

    def splits(config: Config):
        yield 1
        tiles = -(-m // config.bm) * -(-n // config.bn)
        for count in (2, 3, 4, 6, 8, 12, 16, 24, 32):
            if tiles < 2 * sms and k >= 2 * config.bk * count and 4 * m * n * count <= _MAX_WORKSPACE:
                yield count

    choices = ((config, count) for config in CONFIGS for count in splits(config))
    return min(choices, key=lambda choice: estimate(*choice, m, n, k, sms))


def estimate(config: Config, splits: int, m: int, n: int, k: int, sms: int) -> float:
    """Cycles that a product should take; rough, for it need only rank the choices."""
    blocks = -(-m // config.bm) * -(-n // config.bn) * splits
    steps = -(-_slice(k, splits, config.bk) // config.bk)
    per_sm = -(-blocks // sms)
    warps = min(per_sm, config.blocks) * config.threads // 32
    rate = config.efficiency * min(1.0, warps / 6)  # a warp alone in its quarter of the SM waits between its loads
    waves = -(-per_sm // config.blocks)
    compute = per_sm * (steps * config.bk * config.bm * config.bn / 128) / rate + waves * 2000 + steps * waves * 100
    memory = 4 * (m + n) * k / 2300
    extra = 3000 + (splits + 1) * m * n * 4 / 2000 if splits > 1 else 0
    return max(compute, memory) + extra


def _slice(k: int, splits: int, bk: int) -> int:
    """Steps of K in each slice but the last: a multiple of ``bk``."""
    return max(-(-k // (splits * bk)), 1) * bk


def launch_gemm(
    x, x_k_major: bool, ldx: int, w, w_k_major: bool, ldw: int, bias, y, *, relu: bool, alpha: float = 1.0
) -> None:
    """Write ``act(alpha * x @ w.T + bias)`` into ``y``.

    ``x`` (M, K) and ``w`` (N, K) are CUDA tensors of one dtype; ``x[m, k]`` lies ``m * ldx + k`` elements after the
    first if ``x_k_major``, else ``k * ldx + m``, and ``w`` likewise. ``bias`` (N,) contiguous or None; ``y`` (M, N)
    row-major, of the same dtype or float32. Float32 sums are IEEE, in an order that depends only on the shape and the
    card.
    """
    (m, k), n = x.shape, w.shape[0]
    if x.dtype == torch.float32:
        if m and n:
            config, splits = plan(m, n, k, multiprocessors(x.device.index)[1])
            run_tiles(config, splits, x, x_k_major, ldx, w, w_k_major, ldw, bias, y, relu, alpha)
        return
    bias_address = 0 if bias is None else bias.data_ptr()
    launch(
        x.device,
        SOURCE,
        _plain_instance(x.dtype, y.dtype, x_k_major, w_k_major),
        "PqPqPPqqqfi",
        (x.data_ptr(), ldx, w.data_ptr(), ldw, bias_address, y.data_ptr(), m, n, k, alpha, relu),
        grid=-(-m // _PLAIN_TILE) * -(-n // _PLAIN_TILE),
        block=_PLAIN_THREADS,
    )


def run_tiles(config: Config, splits: int, x, x_k_major, ldx, w, w_k_major, ldw, bias, y, relu, alpha=1.0) -> None:
    """:func:`launch_gemm` for float32 with a given tile and at most ``splits`` slices of K."""
    (m, k), n = x.shape, w.shape[0]
    slice_k = _slice(k, splits, config.bk)
    splits = max(-(-k // slice_k), 1)
    sums = y if splits == 1 else torch.empty((splits, m, n), dtype=torch.float32, device=y.device)
    bias = 0 if bias is None else bias.data_ptr()
    launch(
        x.device,
        SOURCE,
        config.instance(x_k_major, w_k_major),
        "PqPqPPqqqqiifi",
        (
            x.data_ptr(),
            ldx,
            w.data_ptr(),
            ldw,
            bias,
            sums.data_ptr(),
            m,
            n,
            k,
            slice_k,
            splits,
            max(2048 // config.bm, 1),
            alpha,
            relu,
        ),
        grid=-(-m // config.bm) * -(-n // config.bn) * splits,
        block=config.threads,
        shared=config.shared,
    )
    if splits > 1:
        launch(
            x.device,
            SOURCE,
            "gemm_simt_sum",
            "PPPqqifi",
            (sums.data_ptr(), bias, y.data_ptr(), m, n, splits, alpha, relu),
            grid=-(-m * n // _SUM_THREADS),
            block=_SUM_THREADS,
        )
