"""Check several calls that compute the same, time them against each other, and assemble a row: for every benchmark.

Correct before fast: a call whose output is not within its tolerance of the float64 reference is never timed, and what
the timed runs left behind is checked again.
"""

from __future__ import annotations

import contextlib
import functools
import json
import math
import signal
import statistics
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from qsparse.bench.telemetry import Telemetry, watch
from qsparse.errors import UserError
from qsparse.kernels import _load
from qsparse.timing import graph_times, percentile, wall_times

REPETITIONS = 100
_LEAST_REPETITIONS = 10
_SLOW_S = 0.005  # a longer call is repeated less often ...
_SLOW_BUDGET_S = 1.0  # ... within this, for all calls of a comparison together
_CPU_BUDGET_S = 0.3
_HOST_CALLS = 50  # below the number of launches that the driver queues before it makes the host wait
_HOST_BUDGET_S = 0.005
_HOST_ROUNDS = 5
PATIENCE_S = 60.0
"""With a peer's first call, in which it may have to be compiled."""
_WORTH_SAYING_S = 1.0
_CHECKED_IN_FULL = 4096
_COPIED_BYTES = 2**30


@dataclass(frozen=True)
class Tolerance:
    """Largest error allowed: of the whole output by its norm, of the worst element by the largest of the output."""

    norm: float
    worst: float


# 16-bit outputs are rounded once (half an ulp: 4.9e-4, 3.9e-3). Sums in float32 are off by about 2.5e-8 * sqrt(K).
# tf32 rounds its inputs to 11 bits, or cuts them.
TOLERANCES = {
    "float32": Tolerance(1e-5, 5e-5),
    "tf32": Tolerance(2e-3, 4e-3),
    "float16": Tolerance(5e-4, 1e-3),
    "bfloat16": Tolerance(4e-3, 8e-3),
    "int8": Tolerance(1e-6, 1e-6),  # exact integers; the epilogue rounds a few times in float32
    "float8": Tolerance(5e-3, 1e-2),  # 16-bit outputs of sums that the tensor cores hold in 14 bits or more
}
EXACT = Tolerance(1e-300, 1e-300)
"""Every bit must be right."""


@dataclass(frozen=True)
class Error:
    """How far an output is from its reference, each part as in `Tolerance`; NaN where either is not finite."""

    norm: float
    worst: float

    def within(self, tolerance: Tolerance) -> bool:
        return self.norm < tolerance.norm and self.worst < tolerance.worst  # False for NaN


@dataclass(frozen=True)
class Reference:
    """Rows of the right output in float64: `values` (R, N) are its rows `rows` (R,), or all of them for None."""

    values: Tensor
    rows: Tensor | None = None

    def error(self, output: Tensor) -> Error:
        """The error of `output` (M, N) on the reference's rows; the other rows must be finite at least."""
        if not bool(torch.isfinite(output).all()):
            return Error(math.nan, math.nan)
        picked = output if self.rows is None else output[self.rows]
        difference = picked.to(torch.float64) - self.values
        norm, largest = float(self.values.norm()) or 1.0, float(self.values.abs().max()) or 1.0
        return Error(float(difference.norm()) / norm, float(difference.abs().max()) / largest)


def product_reference(a: Tensor, b: Tensor, bias: Tensor | None = None, *, relu: bool = False) -> Reference:
    """`act(a @ b.T + bias)` in float64 on the device of `a` (M, K) and `b` (N, K).

    Beyond 4,096 rows only the first and the last 128 and 256 between them, by chance.
    """
    rows = _sampled_rows(a.shape[0]) if a.shape[0] > _CHECKED_IN_FULL else None
    rows = None if rows is None else rows.to(a.device)
    values = (a if rows is None else a[rows]).to(torch.float64) @ b.to(torch.float64).t()
    if bias is not None:
        values += bias.to(torch.float64)
    return Reference(values.relu_() if relu else values, rows)


def _sampled_rows(count: int) -> Tensor:
    between = 128 + torch.randperm(count - 256, generator=torch.Generator().manual_seed(0))[:256].sort().values
    return torch.cat([torch.arange(128), between, torch.arange(count - 128, count)])


@dataclass(frozen=True)
class Call:
    """A call and what must be set around it (the other library's switches)."""

    function: Callable[[], Tensor]
    setting: Callable[[], AbstractContextManager] = nullcontext

    def __call__(self) -> Tensor:
        with self.setting():
            return self.function()


@dataclass(frozen=True)
class Contender:
    """A call with what it ought to return."""

    call: Call
    reference: Reference
    tolerance: Tolerance


def willing(
    calls: dict[str, Call], reference: Reference, tolerance: Tolerance, say: Callable[[str], None]
) -> dict[str, Contender]:
    """The calls that the library takes at all, as contenders; what it says of the others is said.

    A first call that takes longer than `PATIENCE_S` counts as refused.
    """
    found = {}
    for name, call in calls.items():
        started = time.perf_counter()
        try:
            with _limited(PATIENCE_S):
                call()
        except RuntimeError as error:
            if isinstance(error, torch.cuda.OutOfMemoryError):
                raise
            say(f"{name} refused: {str(error).strip().splitlines()[0]}")
        else:
            found[name] = Contender(call, reference, tolerance)
            seconds = time.perf_counter() - started
            if seconds > _WORTH_SAYING_S:
                say(f"{name}: its first call took {seconds:.1f} s")
    return found


@contextlib.contextmanager
def _limited(seconds: float) -> Iterator[None]:
    """RuntimeError inside, and out of it, as soon as it takes longer. In the main thread only, which signals reach."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    late = RuntimeError(f"not done within {seconds:g} s")

    def stop(*_: object) -> None:
        raise late

    before = signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, seconds, 1.0)  # again every second: a library may swallow one
    try:
        yield
    except Exception as error:  # a library may wrap it too
        cause: BaseException | None = error
        while cause is not None and cause is not late:
            cause = cause.__cause__ or cause.__context__
        if cause is None:
            raise
        raise late from None
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)


@dataclass(frozen=True)
class Measurement:
    """What came out for one contender. Times in microseconds, None where there are none (a wrong output has none).

    `launches` names our kernels that ran, as SOURCE:INSTANCE with every template parameter: the configuration.
    `failure` is what a kernel said that could not run.
    """

    error: Error
    correct: bool
    us: float | None = None
    us_p10: float | None = None
    us_p90: float | None = None
    repetitions: int = 0
    host_us: float | None = None
    launches: tuple[str, ...] = ()
    failure: str | None = None

    @property
    def tier(self) -> str:
        """The best tier among the kernels that ran; `cpu` where none did."""
        tiers = {_load.tier_of(launch.partition(":")[0]) for launch in self.launches}
        return next((tier for tier in ("sm90", "sm80", "simt") if tier in tiers), "cpu")


def compete(
    kernels: dict[str, Contender],
    peers: dict[str, Contender],
    device: torch.device,
    repetitions: int = REPETITIONS,
    *,
    host: bool = True,
) -> tuple[dict[str, Measurement], dict[str, float | None]]:
    """Check and time our `kernels` and the `peers` in one interleaved run.

    On a GPU the time is that of a CUDA-graph replay with the L2 cache flushed before it, `repetitions` times (fewer for
    calls beyond 5 ms), and (unless `host` is false) `host_us` the time that one call keeps the host without waiting for
    the GPU. On a CPU it is wall-clock time. One of our kernels that cannot run is wrong, and the others go on.

    Returns (measurement by name, telemetry fields).
    """
    contenders = kernels | peers
    measured, seconds = {}, []
    for name, contender in contenders.items():
        try:
            with _poisoned() if name in kernels else nullcontext(), _load.launched() as launches:
                output = contender.call()
        except RuntimeError as failure:
            if name in peers or isinstance(failure, torch.cuda.OutOfMemoryError):
                raise
            measured[name] = Measurement(Error(math.nan, math.nan), correct=False, failure=str(failure))
            continue
        error = contender.reference.error(output)
        measured[name] = Measurement(error, error.within(contender.tolerance), launches=tuple(launches))
    timed = {name: contender.call for name, contender in contenders.items() if measured[name].correct}
    if not timed:
        return measured, Telemetry().fields()

    with watch(device) as telemetry:
        if device.type == "cuda":
            seconds = [_seconds(call) for call in timed.values()]
            samples, outputs = graph_times(timed, device, _repetitions(repetitions, seconds))
        else:
            samples, outputs = wall_times(timed, _CPU_BUDGET_S)
    host_us = _host_us(timed, seconds) if host and device.type == "cuda" else {}
    for name, times in samples.items():
        error = contenders[name].reference.error(outputs[name])
        if not error.within(contenders[name].tolerance):  # right alone, wrong in the timed run
            measured[name] = replace(measured[name], error=error, correct=False)
            continue
        measured[name] = replace(
            measured[name],
            us=round(percentile(times, 50), 3),
            us_p10=round(percentile(times, 10), 3),
            us_p90=round(percentile(times, 90), 3),
            repetitions=len(times),
            host_us=host_us.get(name),
        )
    return measured, telemetry.fields()


@contextlib.contextmanager
def _poisoned() -> Iterator[None]:
    """`torch.empty` gives NaN: what a kernel forgets to write shows, even where an earlier right output lay there."""
    before = torch.are_deterministic_algorithms_enabled(), torch.utils.deterministic.fill_uninitialized_memory
    torch.utils.deterministic.fill_uninitialized_memory = True
    torch.use_deterministic_algorithms(True)  # the filling works in this mode only
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(before[0])
        torch.utils.deterministic.fill_uninitialized_memory = before[1]


def _seconds(call: Call) -> float:
    """One call from start to end, the launch included."""
    torch.cuda.synchronize()
    started = time.perf_counter()
    call()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _repetitions(wanted: int, seconds: list[float]) -> int:
    if max(seconds) <= _SLOW_S:
        return wanted
    return min(wanted, max(_LEAST_REPETITIONS, int(_SLOW_BUDGET_S / sum(seconds))))


def _host_us(calls: dict[str, Call], seconds: list[float]) -> dict[str, float]:
    """Host time of one call of each: a loop without waiting, short enough that no queue fills up; median of rounds.

    Calls that keep the GPU busy for more than 5 ms are left out: nobody waits for the host there.
    """
    counts = {
        name: min(_HOST_CALLS, int(_HOST_BUDGET_S / each))
        for name, each in zip(calls, seconds, strict=True)
        if each <= _SLOW_S
    }
    rounds: dict[str, list[float]] = {name: [] for name in counts}
    for _ in range(_HOST_ROUNDS):
        for name, count in counts.items():
            call = calls[name]
            with call.setting():
                torch.cuda.synchronize()
                started = time.perf_counter()
                for _ in range(count):
                    call.function()
                rounds[name].append((time.perf_counter() - started) / count * 1e6)
    torch.cuda.synchronize()
    return {name: round(statistics.median(times), 2) for name, times in rounds.items()}


def copy_gbps(device: torch.device) -> float:
    """The bandwidth ceiling: GB/s (read and written) of copying 1 GiB on a GPU.

    A kernel copies (by negating): in a graph `copy_` is a node of the copy engines, which are slower.
    """
    source = torch.randn(_COPIED_BYTES // 4, device=device)
    copy = functools.partial(torch.neg, source, out=torch.empty_like(source))
    return 2 * _COPIED_BYTES / _median_us(copy, device) / 1e3


def read_gbps(device: torch.device) -> float:
    """GB/s of reading 1 GiB on a GPU and writing next to nothing: the better of a sum and a matrix times a vector."""
    read = torch.randn(_COPIED_BYTES // 2, device=device, dtype=torch.float16)
    matrix, vector = read.view(-1, 2**14), read[: 2**14].clone()
    calls = functools.partial(torch.sum, read.view(torch.float32)), functools.partial(torch.mv, matrix, vector)
    return _COPIED_BYTES / min(_median_us(call, device) for call in calls) / 1e3


def _median_us(call: Callable[[], Tensor], device: torch.device) -> float:
    samples, _ = graph_times({"call": call}, device, 20)
    return percentile(samples["call"], 50)


def row(
    *,
    op: str,
    dtype: str,
    shape: tuple[int, ...],
    kernel: Measurement,
    peer: str,
    against: Measurement,
    flop: int,
    nbytes: int,
    environment: dict,
    density: float | None = None,
    tier: str | None = None,
    **more: object,
) -> dict:
    """One measurement as a JSON-able row: our `kernel` beside the `peer` measured as `against`.

    Args:
        shape: M, N, K of the layer. flop, nbytes: the work, and what must be read and written at least.
        tier: where it does not follow from the kernels that were launched.
        environment: the fields of `qsparse.measure` that say where and when.
        more: fields of this benchmark, added as they are.

    Times are null for an output that was wrong (`correct` false), errors are null where it was not finite, `ratio` is
    peer_us / us: above 1 is faster than the peer.
    """
    us = kernel.us
    both = us and against.us
    return {
        "op": op,
        "tier": tier or kernel.tier,
        "dtype": dtype,
        "shape": list(shape),
        "density": density,
        "us": us,
        "us_p10": kernel.us_p10,
        "us_p90": kernel.us_p90,
        "peer": peer,
        "peer_us": against.us,
        "ratio": round(against.us / us, 4) if both else None,
        "correct": kernel.correct,
        "failure": kernel.failure,
        "error": _finite(kernel.error.norm),
        "error_worst": _finite(kernel.error.worst),
        "peer_error": _finite(against.error.norm),
        "tflops": float(f"{flop / us / 1e6:.6g}") if us and flop else None,
        "gbps": round(nbytes / us / 1e3, 2) if us else None,
        "launches": list(kernel.launches),
        "repetitions": kernel.repetitions,
        "host_us": kernel.host_us,
        "peer_host_us": against.host_us,
        **more,
        **environment,
    }


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def append(path: Path, rows: Iterable[dict]) -> None:
    """Add rows to a JSON-lines file, which need not exist. Raises UserError where it cannot be written,
    and for another name than *.jsonl: that may be somebody's file.

    With no rows it only finds that out, before anything is measured.
    """
    if path.suffix != ".jsonl":
        raise UserError(f"--out {path} is no file of rows: give it a name that ends in .jsonl")
    lines = [json.dumps(row, allow_nan=False) + "\n" for row in rows]
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.writelines(lines)
    except OSError as error:
        raise UserError(f"--out {path}: the rows cannot be written there: {error.strerror}") from error


def geometric_mean(values: Iterable[float]) -> float:
    """The geometric mean of positive values (NaN for none)."""
    logarithms = [math.log(value) for value in values]
    return math.exp(sum(logarithms) / len(logarithms)) if logarithms else math.nan
