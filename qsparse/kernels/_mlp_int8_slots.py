"""Zeroed memory that a launch finds as the last one on its stream left it: counters, numbers of launches."""

from __future__ import annotations

import threading

import torch


class Slots:
    """So many slots of so many bytes (a multiple of 128) of one device.

    Launches that may run at the same time must not share any. Those of one stream follow each other, so a stream has
    one slot. A captured launch may be replayed on any stream and gets a slot of its own for ever; its replays follow
    each other.
    """

    def __init__(self, device: torch.device, count: int, size: int):
        self._memory = torch.zeros(count * size, dtype=torch.uint8, device=device)
        self._count, self._size, self._used = count, size, 0
        self._streams: dict[int, int] = {}

    def slot(self, stream: int, captured: bool) -> int | None:
        """The address of a slot, or None where all are taken."""
        index = None if captured else self._streams.get(stream)
        if index is None:
            if self._used == self._count:
                return None
            index, self._used = self._used, self._used + 1
            if not captured:
                self._streams[stream] = index
        return self._memory.data_ptr() + index * self._size


_of_device: dict[tuple[int, int], Slots] = {}
_lock = threading.Lock()  # two threads at once must not get the same slot


def slot_of(device: torch.device, count: int, size: int) -> int | None:
    """The address of a slot of ``size`` bytes, ``count`` of which a device has, for a launch on the current stream.

    None where there is none: all are taken, or the first would have to be made while a graph is captured, to which its
    memory would then belong.
    """
    captured = torch.cuda.is_current_stream_capturing()
    with _lock:
        if (device.index, size) not in _of_device:
            if captured:
                return None
            _of_device[device.index, size] = Slots(device, count, size)
            torch.cuda.current_stream(device).synchronize()  # the zeros are there for every stream
        return _of_device[device.index, size].slot(torch._C._cuda_getCurrentRawStream(device.index), captured)
