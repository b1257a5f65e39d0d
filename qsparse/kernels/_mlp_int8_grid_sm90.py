"""The host side of ``mlp_int8_grid_sm90.cu``: which networks it takes, what lies where, and the launch."""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, prepare, tensor_map
from qsparse.kernels._mlp_int8_slots import slot_of

SOURCE = "mlp_int8_grid_sm90.cu"
HIDDEN, ROWS, PIECE, LONGEST, HEAD = 3, 64, 128, 1024, 16  # as in the kernel; outputs of the head
SHARED = 232_448 - 512  # bytes that a block may ask for, less the kernel's own arrays
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPPiiii")
_NETWORK = struct.Struct("@PPPPPiiii0P")
_FORMATS = f"128s128s128s{(HIDDEN + 1) * _LAYER.size + _NETWORK.size}s"
_SLOTS, _TURN, _SLOT_BYTES = 256, 256, 256 + 2 * HIDDEN * ROWS * 4


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``bn`` outputs a block, ``split`` blocks that divide K."""

    bn: int
    split: int

    @property
    def instance(self) -> str:
        return f"mlp_int8_grid_sm90<{self.bn}, {self.split}>"


CONFIGS = (Config(128, 4), Config(64, 8))
INSTANCES = tuple(config.instance for config in CONFIGS)


@dataclass(frozen=True)
class Plan:
    """A configuration for a network: its blocks, and what lies where in shared and scratch memory."""

    config: Config
    blocks: int
    weights_at: tuple[int, ...]
    shared: int
    quantized_at: tuple[int, ...]
    scratch: int


@functools.lru_cache(maxsize=1024)
def plan(sizes: tuple[int, ...], m: int, config: Config) -> Plan | None:
    """Lay out a network of these widths at ``m`` rows; None where it does not fit."""
    *widths, outputs = sizes
    hidden = len(widths) - 1
    if not 1 <= hidden <= HIDDEN or not 1 <= m <= ROWS or min(sizes) < 1 or outputs > HEAD:
        return None
    if widths[0] > LONGEST or any(k % 16 for k in widths):
        return None
    blocks = max(-(-n // config.bn) for n in widths[1:]) * config.split
    shares = [-(-(-(-k // PIECE)) // config.split) for k in widths[:-1]]  # noqa: B002
    sums = (2 if config.bn == 64 else 1) * ROWS * (config.bn + 8) * 4
    first = at = -(-max(sums, max(shares) * ROWS * PIECE) // 1024) * 1024
    weights_at = []
    for share in shares:
        weights_at.append(at)
        at += share * config.bn * PIECE
    at = max(at, first + outputs * widths[-1])
    if at + 1024 > SHARED or blocks < m:
        return None
    quantized = list(itertools.accumulate((ROWS * n for n in widths[1:]), initial=0))
    return Plan(config, blocks, tuple(weights_at), at + 1024, tuple(quantized[:-1]), quantized[-1])


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Plan | None:
    """The plan for a network and a batch, or None where another way is faster or nothing fits."""
    found = (plan(sizes, m, config) for config in CONFIGS)
    return next((p for p in found if p and p.blocks <= sms), None)


def launch_mlp(x: torch.Tensor, layers: list[tuple], found: Plan | None = None) -> torch.Tensor | None:
    """Logits (M, N) of ``layers`` (w, scale_w, bias or None, scale_x or None), or None where another way should go.

    ``found`` is what ``choose`` would give, for measurements.
    """
    sizes = (x.shape[1], *(w.shape[0] for w, *_ in layers))
    found = found or choose(sizes, x.shape[0], multiprocessors(x.device.index)[1])
    if found is None:
        return None
    x = rows(x)
    layers = [(rows(w), rows(scale), None if bias is None else rows(bias), fixed) for w, scale, bias, fixed in layers]
    if x.data_ptr() % (4 * x.element_size()) or any(w.data_ptr() % 16 for w, *_ in layers):
        return None
    slot = slot_of(x.device, _SLOTS, _SLOT_BYTES)
    if slot is None:
        return None
    y = torch.empty((x.shape[0], sizes[-1]), dtype=torch.float32, device=x.device)
    scratch = torch.empty(found.scratch, dtype=torch.uint8, device=x.device)
    packed = [
        _LAYER.pack(
            scale_w.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if scale_x is None else scale_x.data_ptr(),
            scratch.data_ptr() + quantized,
            *w.shape,
            int(scale_w.numel() > 1),
            at,
        )
        for (w, scale_w, bias, scale_x), quantized, at in zip(
            layers, (*found.quantized_at, 0), (*found.weights_at, 0), strict=True
        )
    ]
    head = layers[-1][0]
    shape = (x.shape[0], len(layers) - 1, _ELEMENTS[x.dtype], found.weights_at[0])
    network = _NETWORK.pack(x.data_ptr(), head.data_ptr(), y.data_ptr(), slot, slot + _TURN, *shape)
    box = (found.config.bn, PIECE)
    maps = [tensor_map(w.data_ptr(), w.dtype, *w.shape, w.shape[1], box) for w, *_ in layers[:-1]]
    launch = prepare(
        *(x.device.index, SOURCE, found.config.instance, _FORMATS, found.blocks, 256, found.shared),
        cluster=found.config.split,
        cooperative=True,
    )
    parameters = b"".join(packed).ljust((HIDDEN + 1) * _LAYER.size, b"\0") + network
    launch((*maps, *maps[:1] * (HIDDEN - len(maps)), parameters))
    return y
