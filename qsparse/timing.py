"""Time several calls against each other, interleaved in one run: callables in, microseconds and their outputs out.

Interleaving (one call of each, then again from the first) spreads a change of clock or load over all of them, so that
the ratio of two medians holds even where the medians drift.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor

Calls = dict[str, Callable[[], Tensor]]

_WARMUP_ROUNDS = 3
_ENOUGH_ROUNDS = 20
_LEAST_ROUNDS = 3
_GRAPH_WARMUP_ROUNDS = 20
_WARMUP_SHARE = 5  # of few repetitions, which are long calls, a fifth is warming enough
# The flush must outlast the host's launch of the next replay, or the host's time would be counted: 512 MiB take 0.1 ms
# at the 4.3 TB/s of an H200, several times a launch.
_FLUSH_BYTES = 512 * 2**20


def wall_times(calls: Calls, budget_s: float) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Wall-clock time of each call on the CPU, round-robin, after warm-up.

    Rounds go on until `budget_s` seconds a call are spent and each has 20; slow calls end after twice the budget, with
    at least 3 rounds.

    Returns:
        (microseconds of every repetition by name, the last output by name).
    """
    samples: dict[str, list[float]] = {name: [] for name in calls}
    outputs: dict[str, Tensor] = {}
    budget = budget_s * len(calls)
    for rounds in range(_WARMUP_ROUNDS):
        started = time.perf_counter()
        for call in calls.values():
            call()
        if (time.perf_counter() - started) * (rounds + 1) > budget / 4:  # slow calls need no further warming
            break
    started = time.perf_counter()
    for rounds in range(2**31):
        spent = time.perf_counter() - started
        if rounds >= _LEAST_ROUNDS and spent > (budget if rounds >= _ENOUGH_ROUNDS else 2 * budget):
            break
        for name, call in calls.items():
            before = time.perf_counter()
            outputs[name] = call()
            samples[name].append((time.perf_counter() - before) * 1e6)
    return samples, outputs


def graph_times(
    calls: Calls, device: torch.device, repetitions: int = 100
) -> tuple[dict[str, list[float]], dict[str, Tensor]]:
    """Device time of each call as the replay of a CUDA graph, round-robin, after warm-up, the L2 cache flushed before.

    Args:
        calls: work on the current stream of `device`, capturable (no synchronisation, inputs resident).
        device: a CUDA device.
        repetitions: replays of each that are counted.

    Returns:
        (microseconds of every repetition by name, the output of the last replay by name).
    """
    with torch.cuda.device(device):
        l2_bytes = torch.cuda.get_device_properties(device).L2_cache_size
        flush = torch.empty(max(_FLUSH_BYTES, 4 * l2_bytes), dtype=torch.uint8, device=device)
        graphs, outputs = {}, {}
        for name, call in calls.items():
            graphs[name], outputs[name] = _capture(call)
        warmup = min(_GRAPH_WARMUP_ROUNDS, -(-repetitions // _WARMUP_SHARE))
        events: dict[str, list[tuple[torch.cuda.Event, torch.cuda.Event]]] = {name: [] for name in calls}
        for _ in range(warmup + repetitions):
            for name, graph in graphs.items():
                start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
                flush.zero_()
                start.record()
                graph.replay()
                end.record()
                events[name].append((start, end))
        torch.cuda.synchronize()
        counted = {name: pairs[warmup:] for name, pairs in events.items()}
        samples = {name: [start.elapsed_time(end) * 1e3 for start, end in pairs] for name, pairs in counted.items()}
        return samples, {name: output.clone() for name, output in outputs.items()}


def _capture(call: Callable[[], Tensor]) -> tuple[torch.cuda.CUDAGraph, Tensor]:
    """The call as a graph, and the tensor that a replay writes. The first calls compile and allocate: a side stream.

    RuntimeError if the call waits for the device. It is asked before the capture: PyTorch does not get over one that
    breaks off, and every later capture of the process would fail with it.
    """
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(_WARMUP_ROUNDS):
            call()
        with _no_waiting():
            call()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        output = call()
    return graph, output


@contextmanager
def _no_waiting() -> Iterator[None]:
    """What makes the host wait for the device raises RuntimeError inside."""
    before = torch.cuda.get_sync_debug_mode()
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Synchronization debug mode is a prototype")
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode(before)


def percentile(samples: list[float], percent: float) -> float:
    """The `percent`-th percentile of `samples`, linear between neighbours (NaN for none)."""
    if not samples:
        return math.nan
    return float(torch.quantile(torch.tensor(samples, dtype=torch.float64), percent / 100))
