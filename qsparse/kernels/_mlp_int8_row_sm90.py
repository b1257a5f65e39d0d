"""The host side of ``mlp_int8_row_sm90.cu``: which networks and batches it takes, who does what, and the launch.

A group of blocks takes some rows through all layers. It is a cluster, or, for one row and a large network, most of the
GPU, launched so that all its blocks run at once.
"""

from __future__ import annotations

import functools
import itertools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, prepare
from qsparse.kernels._mlp_int8_slots import slot_of

SOURCE = "mlp_int8_row_sm90.cu"
LAYERS, OUTPUTS, OWN = 4, 4, 256  # as in the kernel
LARGEST_CLUSTER = 16
SHARED = 232_448  # bytes that a block may ask for
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPPiiiiiiii")
_NETWORK = struct.Struct("@PPPiiiiii0P")
_FORMATS = f"{LAYERS * _LAYER.size + _NETWORK.size}s"
_SLOTS, _TAGS_AT, _WIDTHS = 64, 128, 3 * 4096  # slots of tagged outputs; where these begin, and how many at most


@dataclass(frozen=True)
class Config:
    """The kernel's template: up to ``rows`` rows a group, ``warps`` a block; ``tags`` in place of clusters."""

    rows: int
    warps: int
    tags: bool

    @property
    def longest(self) -> int:
        """The widest input of a layer."""
        return 4096 if self.rows == 1 else 1024

    @property
    def instance(self) -> str:
        return f"mlp_int8_row_sm90<{self.rows}, {self.warps}, {str(self.tags).lower()}>"


ONE = Config(rows=1, warps=8, tags=False)
FEW = Config(rows=8, warps=8, tags=False)
WIDE = Config(rows=1, warps=8, tags=True)
CONFIGS = (ONE, FEW, WIDE)
INSTANCES = tuple(config.instance for config in CONFIGS)


@dataclass(frozen=True)
class Plan:
    """A configuration for a network and a batch: who does what, and what lies where in shared memory."""

    config: Config
    group: int  # blocks of a group
    rows: int  # rows of a group
    groups: int
    slices: tuple[int, ...]
    weights_at: tuple[int, ...]
    scales_at: tuple[int, ...]
    outputs_at: tuple[int, ...]  # with tags, their number
    raw_at: int
    shared: int


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


@functools.lru_cache(maxsize=1024)
def plan(sizes: tuple[int, ...], m: int, config: Config, group: int, rows: int | None = None) -> Plan | None:
    """Lay out a network of these widths at ``m`` rows for groups of ``group`` blocks; None where it does not fit.

    ``rows`` of a group are those of the configuration where they are left out.
    """
    layers, last, rows = len(sizes) - 1, len(sizes) - 2, min(rows or config.rows, m)
    if not 2 <= layers <= LAYERS or min(*sizes, m) < 1 or m >= 2**31 - config.rows or rows > group:
        return None
    if max(sizes[:-1]) > config.longest or any(k % 16 for k in sizes[:-1]):
        return None
    if m > 1 if config.tags else not 1 < group <= LARGEST_CLUSTER:
        return None
    slices = tuple(_up(-(-n // group) if i < last else n, OUTPUTS) for i, n in enumerate(sizes[1:]))
    at = OWN + config.rows * config.longest
    raw_at, at = at, at + 4 * config.rows * config.longest
    weights_at, scales_at, outputs_at, tagged = [], [], [], 0
    for i, (k, n) in enumerate(itertools.pairwise(sizes)):
        scales_at.append(at)
        at = _up(at + 8 * slices[i], 128)
        weights_at.append(at)
        at = _up(at + k * (slices[i] if i < last else n), 128)
        outputs_at.append(tagged if config.tags else at)
        if i < last:
            tagged += n
            at += 0 if config.tags else 4 * rows * n
    if at > SHARED:
        return None
    at = min(_up(at, 16384), SHARED)  # a size of its own is a kernel of its own to the loader
    places = (tuple(each) for each in (weights_at, scales_at, outputs_at))
    return Plan(config, group, rows, -(-m // rows), slices, *places, raw_at, at)


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Plan | None:
    """The plan for a network and a batch, or None where another way is faster or nothing fits."""
    for config, group in _candidates(m, sms):
        found = plan(sizes, m, config, group)
        if found and found.groups * group <= sms:
            return found
    return None


def _candidates(m: int, sms: int):
    """Configurations that may suit ``m`` rows, with the blocks of a group, the best first."""
    if m == 1:
        yield ONE, 16
        yield WIDE, sms // 4 * 4
    elif m <= 64:
        yield FEW, 16
        yield FEW, 8


def suits(x: torch.Tensor, layers: list[tuple]) -> bool:
    """Whether the copies of the kernel can read these arrays (rows of x and weights, contiguous)."""
    return x.data_ptr() % (4 * x.element_size()) == 0 and all(w.data_ptr() % 16 == 0 for w, *_ in layers)


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
    tagged = slot_of(x.device, _SLOTS, _TAGS_AT + 8 * _WIDTHS) if found.config.tags else 0
    if tagged is None or not suits(x, layers):
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
            *(each[i] for each in (found.slices, found.weights_at, found.scales_at, found.outputs_at)),
            0,
        )
        for i, (w, scale_w, bias, scale_x) in enumerate(layers)
    ]
    shape = (x.shape[0], len(layers), found.group, found.rows, _ELEMENTS[x.dtype], found.raw_at)
    network = _NETWORK.pack(x.data_ptr(), y.data_ptr(), tagged + _TAGS_AT if found.config.tags else 0, *shape)
    launch = prepare(
        *(x.device.index, SOURCE, found.config.instance, _FORMATS),
        *(found.group * found.groups, 32 * found.config.warps, found.shared),
        cluster=1 if found.config.tags else found.group,
        cooperative=found.config.tags,
    )
    launch((b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network,))
    return y
