"""The host side of ``mlp_int8_sm90.cu``: which networks and batches it takes, how blocks share the work, the launch.

A group of blocks takes a tile of rows through all layers. Groups up to 16 blocks are clusters; a larger one counts its
blocks in memory, and is launched so that all of them run at once.
"""

from __future__ import annotations

import functools
import struct
from dataclasses import dataclass

import torch

from qsparse.kernels._face import rows
from qsparse.kernels._load import multiprocessors, prepare

SOURCE = "mlp_int8_sm90.cu"
LAYERS, PIECE, LONGEST = 4, 64, 4096  # as in the kernel
SHARED = 231_424  # bytes that a block may ask for, less 1 KB for the kernel's own arrays
LARGEST_CLUSTER = 16
_ELEMENTS = {torch.float32: 0, torch.float16: 1, torch.bfloat16: 2}
_LAYER = struct.Struct("@PPPPPPPiiiiiiii")
_NETWORK = struct.Struct("@PPiiiiii")
_FORMATS = f"{LAYERS * _LAYER.size + _NETWORK.size}s"


@dataclass(frozen=True)
class Config:
    """The kernel's template: ``ks`` times ``wm`` warps, each ``mw`` tiles of 16 rows by ``nt`` of 8 columns."""

    mw: int
    nt: int
    wm: int
    ks: int
    redundant: bool

    @property
    def rows(self) -> int:
        return 16 * self.mw * self.wm

    @property
    def threads(self) -> int:
        return 32 * self.wm * self.ks

    @property
    def instance(self) -> str:
        template = f"{self.mw}, {self.nt}, {self.wm}, {self.ks}, {str(self.redundant).lower()}"
        return f"mlp_int8_sm90<{template}>"


FEW = Config(mw=1, nt=4, wm=1, ks=8, redundant=True)
WIDE = Config(mw=1, nt=8, wm=1, ks=8, redundant=True)
SHARED_16 = Config(mw=1, nt=8, wm=1, ks=8, redundant=False)
SHARED_32 = Config(mw=1, nt=8, wm=2, ks=4, redundant=False)
SHARED_64 = Config(mw=4, nt=4, wm=1, ks=8, redundant=False)
SHARED_128 = Config(mw=1, nt=8, wm=8, ks=1, redundant=False)
SHARED_160 = Config(mw=1, nt=16, wm=10, ks=1, redundant=False)
CONFIGS = (FEW, WIDE, SHARED_16, SHARED_32, SHARED_64, SHARED_128, SHARED_160)
INSTANCES = tuple(config.instance for config in CONFIGS)


@dataclass(frozen=True)
class Plan:
    """A configuration for a network and a batch: blocks a group, and what lies where in shared and scratch memory."""

    config: Config
    group: int
    groups: int
    counted: bool  # a counter is the barrier, not a cluster
    slices: tuple[int, ...]
    lines_at: tuple[int, ...]  # offsets in shared memory: weights, scales of weights, activations
    scales_at: tuple[int, ...]
    act_at: int
    shared: int
    leading: tuple[int, ...]  # row strides of the outputs
    outputs_at: tuple[int, ...]  # offsets in scratch memory: outputs, quantized inputs, their scales
    inputs_at: tuple[int, ...]
    input_scales_at: tuple[int, ...]
    scratch: int


def _up(value: int, step: int) -> int:
    return -(-value // step) * step


def _line(k: int) -> int:
    return (-(-k // PIECE) | 1) * PIECE


@functools.lru_cache(maxsize=1024)
def plan(sizes: tuple[int, ...], m: int, config: Config, group: int, counted: bool) -> Plan | None:
    """Lay out a network of these widths at ``m`` rows for groups of ``group`` blocks; None where it does not fit."""
    layers, last = len(sizes) - 1, len(sizes) - 2
    if layers > LAYERS or min(*sizes, m) < 1 or max(sizes[:-1]) > LONGEST or m >= 2**31 - config.rows:
        return None
    if not counted and group > LARGEST_CLUSTER:
        return None
    groups = -(-m // config.rows)
    slices = tuple(_up(-(-n // group) if i < last else n, 8) for i, n in enumerate(sizes[1:]))
    share = -(-min(m, config.rows) // group)

    at = 4 * config.rows
    if config.ks > 1:
        at += 4 * config.rows * (8 * config.nt + 8)
    scales_at = []
    for width in slices:
        scales_at.append(at)
        at += 8 * width
    act_at = at = _up(at, 128)
    act = share * _line(sizes[last])
    if config.redundant:
        act = max([act, *(min(m, config.rows) * _line(k) for k in sizes[:last])])
    at = _up(at + act, 128)
    # The last layer's weights lie first: the tile of 8 columns that they end in then reads others beyond them, unused.
    lines_at = [0] * layers
    for i in (last, *range(last)):
        lines_at[i] = at
        at += (sizes[-1] if i == last and last > 0 else slices[i]) * _line(sizes[i])
    at = max(at, lines_at[last] + slices[last] * _line(sizes[last]))
    if at > SHARED:
        return None

    padded, leading = groups * config.rows, tuple(_up(n, 4) if i < last else n for i, n in enumerate(sizes[1:]))
    scratch, outputs_at, inputs_at, input_scales_at = 0, [], [], []
    for i in range(last):
        outputs_at.append(scratch)
        scratch = _up(scratch + 4 * padded * leading[i], 256)
        inputs_at.append(scratch)
        scratch = _up(scratch + (0 if config.redundant else padded * _up(sizes[i], PIECE)), 256)
        input_scales_at.append(scratch)
        scratch = _up(scratch + (0 if config.redundant else 4 * padded), 256)
    offsets = (tuple(outputs_at), tuple(inputs_at), tuple(input_scales_at))
    return Plan(
        *(config, group, groups, counted, slices, tuple(lines_at), tuple(scales_at), act_at, at, leading),
        *offsets,
        scratch,
    )


def choose(sizes: tuple[int, ...], m: int, sms: int) -> Plan | None:
    """The plan for a network and a batch, or None where the chain of kernels is faster or nothing fits."""
    for config, group, counted in _candidates(m, sms):
        found = plan(sizes, m, config, group, counted)
        if found:
            return found
    return None


def _candidates(m: int, sms: int):
    """Configurations that may suit ``m`` rows, the best first."""
    if m <= 16:
        yield FEW, 8, False
        yield WIDE, 16, False
        if m <= 4:
            yield FEW, sms // 4 * 4, True
    elif m <= 64:
        yield FEW, 8, False
        yield SHARED_16, 16, False
        yield SHARED_64, sms // 4 * 4, True
    elif m <= 1024:
        yield SHARED_32, 4, False
        yield SHARED_128, 16, False
    else:
        yield SHARED_160, 2, False


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
        counters = _counters(x.device, found.groups)
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
            )
        )
    aligned = sizes[0] % 4 == 0 and x.data_ptr() % (4 * x.element_size()) == 0
    network = _NETWORK.pack(
        x.data_ptr(), counters, x.shape[0], len(layers), found.group, _ELEMENTS[x.dtype], aligned, found.act_at
    )
    launch = prepare(
        *(x.device.index, SOURCE, found.config.instance, _FORMATS),
        *(found.group * found.groups, found.config.threads, found.shared),
        cluster=1 if found.counted else found.group,
        cooperative=found.counted,
    )
    launch((b"".join(packed).ljust(LAYERS * _LAYER.size, b"\0") + network,))
    return y


# --- counters -------------------------------------------------------------------------------------------------------

_SLOTS, _GROUPS, _COUNTER_BYTES = 512, 8, 128


class _Counters:
    """Zeroed counters of one device. Launches that may run at the same time must not share any.

    Those of one stream follow each other, so a stream has one slot. A captured launch may be replayed on any stream and
    gets a slot of its own for ever; its replays follow each other. A launch leaves its counters as it found them.
    """

    def __init__(self, device: torch.device):
        self._memory = torch.zeros(_SLOTS * _GROUPS * _COUNTER_BYTES, dtype=torch.uint8, device=device)
        self._streams: dict[int, int] = {}
        self._used = 0
        torch.cuda.current_stream(device).synchronize()  # the zeros are there for every stream

    def slot(self, stream: int, captured: bool) -> int | None:
        index = None if captured else self._streams.get(stream)
        if index is None:
            if self._used == _SLOTS:
                return None
            index, self._used = self._used, self._used + 1
            if not captured:
                self._streams[stream] = index
        return self._memory.data_ptr() + index * _GROUPS * _COUNTER_BYTES


_of_device: dict[int, _Counters] = {}


def _counters(device: torch.device, groups: int) -> int | None:
    """The address of counters for a launch, or None where there are none: then the chain runs."""
    captured = torch.cuda.is_current_stream_capturing()
    if groups > _GROUPS:
        return None
    if device.index not in _of_device:
        if captured:  # memory taken now would belong to the graph
            return None
        _of_device[device.index] = _Counters(device)
    return _of_device[device.index].slot(torch._C._cuda_getCurrentRawStream(device.index), captured)
