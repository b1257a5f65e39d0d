"""The host side of ``mlp_int8_sm90.cu``: which networks and batches it takes, how blocks share the work, the launch.

A group of blocks takes some rows through all layers. Groups up to 16 blocks are clusters; a larger one counts its
blocks in memory, and is launched so that all of them run at once.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, prepare
from qsparse.kernels._mlp_int8_slots import slot_of

SOURCE = "mlp_int8_sm90.cu"
LAYERS, ROWS, PIECE, LONGEST = 4, 16, 64, 4096  # as in the kernel
SHARED = 231_424  # bytes that a block may ask for, less 1 KB for the kernel's own arrays
LARGEST_CLUSTER = 16
_SLOTS, _GROUPS, _COUNTER_BYTES = 512, 8, 128  # counters: of streams and captures, of groups
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPPPPPiiiiiiiii0P")
_NETWORK = struct.Struct("@PPiiiiiiii0P")
_FORMATS = f"{LAYERS * _LAYER.size + _NETWORK.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``ks`` warps, each of 16 rows by ``nt`` tiles of 8 columns.

    ``mode`` is how blocks exchange activations: SENT, READ or SHARED.
    """

    nt: int
    ks: int
    mode: str

    @property
    def threads(self) -> int:
        return 32 * self.ks

    @property
    def instance(self) -> str:
        return f"mlp_int8_sm90<{self.nt}, {self.ks}, {self.mode}>"


# What was fastest on an NVIDIA H200, 2026-11-30, for the networks of `qsparse bench mlp` at 1, 64 and 1,024 rows.
SENT = Config(nt=4, ks=8, mode="SENT")
READ = Config(nt=2, ks=8, mode="READ")
READ_16 = Config(nt=4, ks=16, mode="READ")
SHARED_16 = Config(nt=8, ks=8, mode="SHARED")
CONFIGS = (SENT, READ, READ_16, SHARED_16)
INSTANCES = tuple(config.instance for config in CONFIGS)


@dataclass(frozen=True)
class Plan:
    """A configuration for a network and a batch: who does what, and what lies where in shared and scratch memory."""

    config: Config
    group: int  # blocks of a group
    rows: int  # rows of a group
    share: int  # rows of a block, where blocks share out a group's
    groups: int
    slices: tuple[int, ...]
    lines_at: tuple[int, ...]  # offsets in shared memory: weights, scales of weights, activations
    scales_at: tuple[int, ...]
    sent_at: tuple[int, ...]  # outputs that are sent
    act_at: int
    shared: int
    leading: tuple[int, ...]  # row strides of the outputs
    outputs_at: tuple[int, ...]  # offsets in scratch memory: outputs, quantized inputs, their scales
    inputs_at: tuple[int, ...]
    input_scales_at: tuple[int, ...]
    scratch: int

    @property
    def counted(self) -> bool:
        """Whether a counter is the barrier, not a cluster."""
        return self.group > LARGEST_CLUSTER


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _line(k: int) -> int:
    return (-(-k // PIECE) | 1) * PIECE


@functools.lru_cache(maxsize=1024)
def plan(sizes: tuple[int, ...], m: int, config: Config, group: int, rows: int | None = None) -> Plan | None:
    """Lay out a network of these widths at ``m`` rows for groups of ``group`` blocks; None where it does not fit.

    ``rows`` of a group are 16 where they are left out.
    """
    layers, last, rows = len(sizes) - 1, len(sizes) - 2, rows or ROWS
    if layers > LAYERS or min(*sizes, m) < 1 or max(sizes[:-1]) > LONGEST or m >= 2**31 - ROWS:
        return None
    if rows > ROWS or (config.mode == "SENT" and not 1 < group <= LARGEST_CLUSTER):
        return None
    groups, held = -(-m // rows), min(m, rows)
    share = -(-held // group)
    slices = tuple(_up(-(-n // group) if i < last else n, 8) for i, n in enumerate(sizes[1:]))
    leading = tuple(_up(n, 4) if i < last else n for i, n in enumerate(sizes[1:]))

    at = 4 * ROWS + 4 * ROWS * (8 * config.nt + 8)
    scales_at, sent_at = [], []
    for width in slices:
        scales_at.append(at)
        at += 8 * width
    for width in leading:
        at = _up(at, 128)
        sent_at.append(at)
        at += 4 * held * width if config.mode == "SENT" and len(sent_at) <= last else 0
    act_at = at = _up(at, 128)
    act = share * _line(sizes[last])
    if config.mode != "SHARED":
        act = max([act, *(held * _line(k) for k in sizes[:last])])
    at = _up(at + act, 128)
    # The last layer's weights lie first: the tile of 8 columns that they end in then reads others beyond them, unused.
    lines_at = [0] * layers
    for i in (last, *range(last)):
        lines_at[i] = at
        at += (sizes[-1] if i == last and last > 0 else slices[i]) * _line(sizes[i])
    at = max(at, lines_at[last] + slices[last] * _line(sizes[last]))
    if at > SHARED:
        return None
    at = min(_up(at, 8192), SHARED)  # a size of its own is a kernel of its own to the loader

    padded = (groups - 1) * rows + ROWS  # warps read whole tiles
    scratch, outputs_at, inputs_at, input_scales_at = 0, [], [], []
    for i in range(last):
        outputs_at.append(scratch)
        scratch = _up(scratch + (0 if config.mode == "SENT" else 4 * m * leading[i]), 256)
        inputs_at.append(scratch)
        scratch = _up(scratch + (padded * _up(sizes[i], PIECE) if config.mode == "SHARED" else 0), 256)
        input_scales_at.append(scratch)
        scratch = _up(scratch + (4 * m if config.mode == "SHARED" else 0), 256)
    offsets = (tuple(each) for each in (lines_at, scales_at, sent_at))
    between = (tuple(each) for each in (outputs_at, inputs_at, input_scales_at))
    return Plan(config, group, rows, share, groups, slices, *offsets, act_at, at, leading, *between, scratch)


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Plan | None:
    """The plan for a network and a batch, or None where the chain of kernels is faster or nothing fits.

    All blocks of a launch that counts them must find a multiprocessor, of which there are ``sms``.
    """
    for candidate in _candidates(m):
        found = plan(sizes, m, *candidate)
        if found and not (found.counted and found.group * found.groups > sms):
            return found
    return None


def _candidates(m: int):
    """Configurations that may suit ``m`` rows, with the blocks and rows of a group, the best first."""
    if m <= 64:
        yield SENT, 8, min(m, 8)
    if m == 1:
        yield READ, 128, 1
        yield READ_16, 128, 1
    elif m <= 64:
        yield READ_16, 32, 16
    elif m <= 1024:
        yield SHARED_16, 2, 16


def launch_mlp(x: torch.Tensor, layers: list[tuple], found: Plan | None = None) -> torch.Tensor | None:
    """Logits (M, N) of ``layers`` (w, scale_w, bias or None, scale_x or None), or None where the chain should run.

    ``found`` is what ``choose`` would give, for measurements.
    """
    sizes = (x.shape[1], *(w.shape[0] for w, *_ in layers))
    found = found or choose(sizes, x.shape[0], multiprocessors(x.device.index)[1])
    if found is None:
        return None
    counters = 0
    if found.counted:
        counters = None if found.groups > _GROUPS else slot_of(x.device, _SLOTS, _GROUPS * _COUNTER_BYTES)
        if counters is None:
            return None
    x = rows(x)
    y = torch.empty((x.shape[0], sizes[-1]), dtype=torch.float32, device=x.device)
    scratch = torch.empty(found.scratch, dtype=torch.uint8, device=x.device)
    base, last, packed, kept = scratch.data_ptr(), len(layers) - 1, [], []
    for i, (w, scale_w, bias, scale_x) in enumerate(layers):
        w, scale_w, bias = rows(w), rows(scale_w), None if bias is None else rows(bias)
        kept.append((w, scale_w, bias))
        n, k = w.shape
        between = (0, 0)
        if i < last:
            between = (base + found.inputs_at[i], base + found.input_scales_at[i])
        packed.append(
            _LAYER.pack(
                w.data_ptr(),
                scale_w.data_ptr(),
                0 if bias is None else bias.data_ptr(),
                0 if scale_x is None else scale_x.data_ptr(),
                base + found.outputs_at[i] if i < last else y.data_ptr(),
                *between,
                n,
                k,
                found.leading[i],
                int(scale_w.numel() > 1),
                found.slices[i],
                found.lines_at[i],
                found.scales_at[i],
                k % 16 == 0 and w.data_ptr() % 16 == 0,
                found.sent_at[i],
            )
        )
    aligned = sizes[0] % 4 == 0 and x.data_ptr() % (4 * x.element_size()) == 0
    shape = (x.shape[0], len(layers), found.group, found.rows, found.share)
    network = _NETWORK.pack(x.data_ptr(), counters, *shape, _ELEMENTS[x.dtype], aligned, found.act_at)
    launch = prepare(
        *(x.device.index, SOURCE, found.config.instance, _FORMATS),
        *(found.group * found.groups, found.config.threads, found.shared),
        cluster=1 if found.counted else found.group,
        cooperative=found.counted,
    )
    launch((b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network,))
    return y
