"""Rows -> a table for the terminal, a pipe or a file."""

import sys
from typing import IO, Any

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qsparse.report.rows import device_name, distinct

_BATCHES = ("1", "64", "1024", "10000")
_MISSING = "-"
_KERNEL_WIDTHS = (60, 36, 28, 20)
_DEVICE_WIDTH = 16
_UNSTEADY = 3  # p90 over p10: an idle machine stays well below
_TIMERS = {
    "wall": "wall-clock time on the CPU",
    "cuda_graph": "device time of a CUDA-graph replay, L2 cache flushed before it",
}


def table(rows: list[dict[str, Any]], width: int | None = None) -> Table:
    """Two lines a row: accuracy, latency and bytes beside each other, with the kernel and the device that gave them.

    Changes, agreement, speed-ups and the share of the weight bytes refer to the baseline measured in the same run.

    Args:
        rows: as from `qsparse.measure`; a missing field shows as "-".
        width: columns that there are. Kernels wrap where they must; where even that is too wide they, and the devices,
            are listed below the table. None: as wide as it needs to be.
    """
    for kernel_width in _KERNEL_WIDTHS:
        columns = _table(rows, kernel_width)
        if width is None or _width(columns) <= width:
            return columns
    return _table(rows, None)


def show(rows: list[dict[str, Any]], file: IO[str] | None = None) -> None:
    """Print the table to `file` (standard output). Where that is no terminal, it is as wide as the table needs."""
    file = file or sys.stdout
    console = Console(file=file)
    if file.isatty():
        console.print(table(rows, console.width))
    else:
        columns = table(rows)
        Console(file=file, width=max(_width(columns), console.width)).print(columns)


def _table(rows: list[dict[str, Any]], kernel_width: int | None) -> Table:
    runs = distinct(rows, "run")
    columns = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=Text(str(runs[0]), style="table.title") if len(runs) == 1 and runs[0] else None,
        title_justify="left",
        caption=Text(_caption(rows, with_kernels=kernel_width is None), style="table.caption"),
        caption_justify="left",
    )
    if len(runs) > 1:
        columns.add_column("run", overflow="fold")
    columns.add_column("variant", overflow="fold", style="bold")
    gap = " " if kernel_width is not None else "\n"  # where space is short, headings give way before names do
    latencies = [f"latency\nbatch{gap}{int(batch):,}" for batch in _BATCHES]
    for heading in ("accuracy\n(change)", "agrees", *latencies, "weight\nbytes"):
        columns.add_column(heading, justify="right", overflow="fold")
    if kernel_width is not None:
        columns.add_column("kernel", overflow="fold", max_width=kernel_width)
        columns.add_column("device", overflow="fold", max_width=_DEVICE_WIDTH)
    for row in rows:
        cells = [str(row.get("run") or _MISSING)] if len(runs) > 1 else []
        cells += [_variant(row), _accuracy(row), _percent(row.get("agreement"))]
        cells += [*(_latency(row, batch) for batch in _BATCHES), _bytes(row)]
        if kernel_width is not None:
            cells += [row.get("kernel") or _MISSING, device_name(row)]
        columns.add_row(*(Text(cell) for cell in cells))  # Text: a name with [brackets] is not markup
    return columns


def _width(columns: Table) -> int:
    """Columns that the table takes when nothing needs to give way."""
    console = Console(width=10_000)
    return Measurement.get(console, console.options, columns).maximum


def _variant(row: dict[str, Any]) -> str:
    name = row.get("variant") or _MISSING
    if row.get("simulated"):
        name += "\nsimulated"
    return name if row.get("density") is None else f"{name}\ndensity {row['density']:.4g}"


def _latency(row: dict[str, Any], batch: str) -> str:
    microseconds = (row.get("latency_us") or {}).get(batch)
    if microseconds is None:
        return _MISSING
    speedup = (row.get("speedup") or {}).get(batch)
    return _time(microseconds) + ("" if speedup is None else f"\n{speedup:.{2 if speedup < 99.5 else 0}f}x")


def _time(microseconds: float) -> str:
    for unit, size in (("µs", 1), ("ms", 1e3)):
        if microseconds < 999.5 * size:
            return f"{_digits(microseconds / size)} {unit}"
    return f"{_digits(microseconds / 1e6)} s"


def _digits(value: float) -> str:
    """Three significant digits, also where they are zeros, so that a column reads evenly."""
    return f"{value:#.3g}".removesuffix(".")


def _accuracy(row: dict[str, Any]) -> str:
    change = row.get("accuracy_change")
    points = "" if change is None else f"\n{change:+.2f}" if round(change, 2) else "\n0.00"
    return _percent(row.get("accuracy")) + points


def _percent(fraction: float | None) -> str:
    return _MISSING if fraction is None else f"{100 * fraction:.2f} %"


def _bytes(row: dict[str, Any]) -> str:
    if row.get("weight_bytes") is None:
        return _MISSING
    ratio = row.get("weight_ratio")
    return f"{row['weight_bytes']:,}" + ("" if ratio is None else f"\n{100 * ratio:.1f} %")


def _caption(rows: list[dict[str, Any]], with_kernels: bool) -> str:
    timers = [_TIMERS[timer] for timer in distinct(rows, "timer") if timer in _TIMERS]
    latency = f"Latency: median {' or '.join(timers)}. " if timers else ""
    caption = (
        f"{latency}Change (in points), agreement, speed-up and share of the bytes: against the baseline "
        "measured beside it."
    )
    if unsteady := [str(row.get("variant")) for row in rows if _is_unsteady(row)]:
        caption += (
            f"\nUnsteady: {', '.join(dict.fromkeys(unsteady))} took over {_UNSTEADY}x longer in some repetitions than "
            "in others. The machine was busy; measure again when it is idle."
        )
    if any(row.get("simulated") for row in rows):
        caption += "\nSimulated: accuracy of rounded numbers in float32 arithmetic. No kernel ran: no time, no bytes."
    if with_kernels:
        kernels = (f"{row.get('variant')}: {row.get('kernel') or _MISSING}, {device_name(row)}" for row in rows)
        caption = "\n".join((caption, *kernels))
    return caption


def _is_unsteady(row: dict[str, Any]) -> bool:
    low, high = row.get("latency_us_p10") or {}, row.get("latency_us_p90") or {}
    return any(high[batch] > _UNSTEADY * low[batch] for batch in low.keys() & high.keys())
