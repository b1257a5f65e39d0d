"""The clock and the power of a GPU while something runs on it: both move every figure."""

from __future__ import annotations

import contextlib
import ctypes
import statistics
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import torch

_INTERVAL_S = 0.02
_NVML_CLOCK_SM = 1


@dataclass
class Telemetry:
    """What was read; the fields of a row are its medians, null where nothing could be read."""

    clocks_mhz: list[float] = field(default_factory=list)
    powers_w: list[float] = field(default_factory=list)

    def fields(self) -> dict[str, float | None]:
        return {
            "sm_clock_mhz": statistics.median(self.clocks_mhz) if self.clocks_mhz else None,
            "power_w": round(statistics.median(self.powers_w), 1) if self.powers_w else None,
        }


@contextlib.contextmanager
def watch(device: torch.device) -> Iterator[Telemetry]:
    """Read the SM clock and the power of `device` in the background until the block ends; on a CPU read nothing."""
    seen = Telemetry()
    read = _reader(device) if device.type == "cuda" else None
    if read is None:
        yield seen
        return
    done = threading.Event()

    def collect() -> None:
        while not done.wait(_INTERVAL_S):
            with contextlib.suppress(OSError):  # one reading less
                clock, power = read()
                seen.clocks_mhz.append(clock)
                seen.powers_w.append(power)

    thread = threading.Thread(target=collect, daemon=True)
    thread.start()
    try:
        yield seen
    finally:
        done.set()
        thread.join()


def _reader(device: torch.device) -> Callable[[], tuple[float, float]] | None:
    """A function that reads (MHz, W) through NVML, the library that the driver brings; None where that fails."""

    def check(status: int) -> None:
        if status:
            raise OSError(f"NVML error {status}")

    try:
        nvml = ctypes.CDLL("libnvidia-ml.so.1")
        check(nvml.nvmlInit_v2())
        uuid = f"GPU-{torch.cuda.get_device_properties(device).uuid}"
        handle, value = ctypes.c_void_p(), ctypes.c_uint()
        check(nvml.nvmlDeviceGetHandleByUUID(uuid.encode(), ctypes.byref(handle)))

        def read() -> tuple[float, float]:
            check(nvml.nvmlDeviceGetClockInfo(handle, _NVML_CLOCK_SM, ctypes.byref(value)))
            clock = float(value.value)
            check(nvml.nvmlDeviceGetPowerUsage(handle, ctypes.byref(value)))
            return clock, value.value / 1000

        read()
        return read
    except (OSError, AttributeError):
        return None
