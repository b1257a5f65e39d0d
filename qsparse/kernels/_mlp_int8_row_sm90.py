"""The host side of ``mlp_int8_row_sm90.cu``: which networks and batches it takes, who does what, and the launch.

Each row of the batch is a cluster's; or, for one row and a wide network, all blocks take it, launched so that they run
at once.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import Launch, multiprocessors, prepare
from qsparse.kernels._mlp_int8_slots import slot_of

SOURCE = "mlp_int8_row_sm90.cu"
LAYERS, HEAD, LONGEST, WIDEST = 3, 16, 1024, 4096  # as in the kernel
SHARED = 220 * 1024  # bytes of shared memory that a block may ask for beside the kernel's own
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPPiiii")
_NETWORK = struct.Struct("@PPPii")
_FORMATS = f"{LAYERS * _LAYER.size + _NETWORK.size}s"
_SLOTS, _TAGS_AT = 64, 128  # of tagged outputs; where these begin in a slot


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``hidden`` layers, of which each of a block's ``warps`` has ``outputs``.

    ``group`` blocks are a row's cluster, or 0 for all blocks and tags.
    """

    hidden: int
    outputs: int
    warps: int
    group: int

    @property
    def longest(self) -> int:
        """The widest input of a layer."""
        return LONGEST if self.group else WIDEST

    @property
    def slice(self) -> int:
        """A block's outputs of a layer."""
        return self.outputs * self.warps

    @property
    def instance(self) -> str:
        """The C++ name of the kernel."""
        sizes = f"{self.hidden}, {self.outputs}, {self.warps}"
        return f"mlp_int8_row_sm90<{sizes}, {self.group}>" if self.group else f"mlp_int8_wide_row_sm90<{sizes}>"


# With the most rows at which it was the fastest way on an NVIDIA H200, 2026-11-30, for the networks of `qsparse bench
# mlp` at 1, 2, 4, 8, 16 and 64 rows; the best first.
_MOST_ROWS = {
    Config(hidden=1, outputs=2, warps=8, group=16): 16,
    Config(hidden=1, outputs=4, warps=8, group=8): 64,
    Config(hidden=1, outputs=4, warps=8, group=16): 16,
    Config(hidden=1, outputs=4, warps=16, group=16): 16,
    Config(hidden=2, outputs=4, warps=16, group=16): 16,
    Config(hidden=2, outputs=2, warps=16, group=0): 1,
}
CONFIGS = tuple(_MOST_ROWS)
INSTANCES = tuple(config.instance for config in CONFIGS)


@dataclass(frozen=True)
class Plan:
    """A configuration for a network and a batch."""

    config: Config
    blocks: int
    shared: int  # bytes of shared memory for the weights


@functools.lru_cache(maxsize=1024)
def plan(sizes: tuple[int, ...], m: int, config: Config) -> Plan | None:
    """A network of these widths at ``m`` rows in this configuration; None where it does not fit."""
    *widths, outputs = sizes
    if len(widths) != config.hidden + 1 or min(*sizes, m) < 1 or outputs > HEAD or m >= 2**26:
        return None
    if max(widths) > config.longest or any(k % 16 for k in widths):
        return None
    if config.group:
        fits = max(widths[1:]) <= config.slice * config.group
        return Plan(config, config.group * m, 0) if fits else None
    shared = -(-(sum(config.slice * k for k in widths[:-1]) + outputs * widths[-1]) // 8192) * 8192
    fits = m == 1 and shared <= SHARED
    return Plan(config, -(-max(widths[1:]) // config.slice), shared) if fits else None


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Plan | None:
    """The plan for a network and a batch, or None where another way is faster or nothing fits."""
    found = (plan(sizes, m, config) for config, most in _MOST_ROWS.items() if m <= most)
    return next((p for p in found if p and (p.config.group or p.blocks <= sms)), None)


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
    launch = _prepared(x.device.index, found)
    if launch is None:
        return None
    tagged = not found.config.group
    slot = slot_of(x.device, _SLOTS, _TAGS_AT + 8 * (LAYERS - 1) * WIDEST) if tagged else 0
    if slot is None:
        return None
    y = torch.empty((x.shape[0], sizes[-1]), dtype=torch.float32, device=x.device)
    packed = [
        _LAYER.pack(
            w.data_ptr(),
            scale_w.data_ptr(),
            0 if bias is None else bias.data_ptr(),
            0 if scale_x is None else scale_x.data_ptr(),
            *w.shape,
            int(scale_w.numel() > 1),
            0,
        )
        for w, scale_w, bias, scale_x in layers
    ]
    network = _NETWORK.pack(x.data_ptr(), y.data_ptr(), slot + _TAGS_AT, _ELEMENTS[x.dtype], 0)
    launch((b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network,))
    return y


@functools.lru_cache(maxsize=1024)
def _prepared(device: int, found: Plan) -> Launch | None:
    """The kernel with its grid, or None where the device does not form such clusters."""
    config = found.config
    launch = prepare(
        *(device, SOURCE, config.instance, _FORMATS, found.blocks, 32 * config.warps, found.shared),
        cluster=max(config.group, 1),
        cooperative=not config.group,
    )
    return launch if not config.group or launch.fits() else None
