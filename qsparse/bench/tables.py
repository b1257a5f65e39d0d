"""Rows of kernels against peers -> tables for the terminal, one a group of rows that compare with each other."""

from __future__ import annotations

import sys
from collections.abc import Iterable
from typing import IO

from rich import box
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from qsparse.bench.summary import group

_MISSING = "-"
_TIMERS = {
    "cuda_graph": "Median device time of a CUDA-graph replay, L2 cache flushed before it, kernel and peers in turn.",
    "wall": "Median wall-clock time on the CPU, kernel and peers in turn.",
}


def show(rows: list[dict], means: list[dict], ceiling: str | None = None, file: IO[str] | None = None) -> None:
    """Print the tables, each with its means, to `file` (standard output).

    Peers of one kernel stand beside each other as their time and `ratio` (peer's time / ours). A wrong kernel shows its
    error and no time.
    """
    file = file or sys.stdout
    for name, members in _tables(rows).items():
        _print(_table(name, members, means), file)
    for line in _caption(rows, ceiling):
        print(line, file=file)


def show_networks(cells: list[dict], means: dict[str, dict], file: IO[str] | None = None) -> None:
    """Print a line for each cell of `bench.mlp` to `file` (standard output), and the means over all cells."""
    table = _empty_table("Whole networks: µs of each, and the fastest peer's time over ours")
    ours, theirs = (list(dict.fromkeys(name for cell in cells for name in cell[field])) for field in ("us", "peers_us"))
    for heading in ("network", "batch", *ours, *theirs, *(f"{name}\nratio" for name in ours)):
        table.add_column(heading, justify="left" if heading == "network" else "right")
    for cell in cells:
        times = [_number(cell["us"][name]) if cell["us"].get(name) else "WRONG" for name in ours]
        peers = [_number(cell["peers_us"].get(name)) + "*" * (name == cell["best_peer"]) for name in theirs]
        ratios = [_ratio(cell["ratio"].get(name)) for name in ours]
        table.add_row("-".join(map(str, cell["sizes"])), f"{cell['batch']:,}", *times, *peers, *ratios)
    blank = [""] * (1 + len(ours) + len(theirs))
    table.add_row("geometric mean", *blank, *(_ratio(means[name]["ratio"]) for name in ours), style="bold")
    table.add_row("worst", *blank, *(_ratio(means[name]["worst_ratio"]) for name in ours), style="bold")
    _print(table, file or sys.stdout)
    print("* the fastest peer of the network and batch.", file=file)
    if any(not time for cell in cells for time in cell["us"].values()):
        print("WRONG: not the outputs of the reference, so not timed.", file=file)


def show_sparse(rows: list[dict], means: list[dict], crossovers: list[dict], file: IO[str] | None = None) -> None:
    """Print what `bench.spmm` found to `file` (standard output): the cells, their means, and the crossovers."""
    file = file or sys.stdout
    groups: dict[tuple, list[dict]] = {}
    for row in rows:
        groups.setdefault((row["op"], row["dtype"], row["plan"]), []).append(row)
    for key, members in groups.items():
        op, dtype, plan = key
        table = _empty_table(f"{op} {dtype}, plan: {plan}")
        peers = list(dict.fromkeys(row["peer"] for row in members))
        headings = ["M, N, K", "density", "tier", "µs", "TFLOP/s"]
        for heading in (*headings, *(_heading(peer, what) for peer in peers for what in ("µs", "ratio")), "error"):
            table.add_column(heading, justify="left" if heading == "M, N, K" else "right")
        cells: dict[tuple, dict[str, dict]] = {}
        for row in members:
            cells.setdefault((*row["shape"], row["density"]), {})[row["peer"]] = row
        for (*shape, density), by_peer in cells.items():
            first = next(iter(by_peer.values()))
            line = [", ".join(map(str, shape)), f"{density:g}", first["tier"]]
            line += [_number(first["us"]) if first["correct"] else "WRONG", _number(first["tflops"])]
            for peer in peers:
                row = by_peer.get(peer, {})
                line += [_number(row.get("peer_us")), _ratio(row.get("ratio"))]
            table.add_row(*line, "not finite" if first["error"] is None else f"{first['error']:.1e}")
        for name in ("ratio", "worst_ratio"):
            found = {mean["peer"]: mean[name] for mean in means if (mean["op"], mean["dtype"], mean["plan"]) == key}
            line = ["geometric mean" if name == "ratio" else "worst", *[""] * (len(headings) - 1)]
            table.add_row(*line, *(cell for peer in peers for cell in ("", _ratio(found.get(peer)))), "", style="bold")
        _print(table, file)
    if crossovers:
        table = _empty_table("Density below which CSR beats the dense product")
        names = [name for name in ("qsparse", "torch_csr") if any(name in entry for entry in crossovers)]
        for heading in ("M, N, K", "dtype", *names):
            table.add_column(heading, justify="left" if heading == "M, N, K" else "right")
        for entry in crossovers:
            found = (_crossover(entry[name]) if name in entry else _MISSING for name in names)
            table.add_row(", ".join(map(str, entry["shape"])), entry["dtype"], *found)
        _print(table, file)
    for line in _caption(rows, None):
        print(line, file=file)


def _crossover(density: float | None) -> str:
    return "all measured" if density is None else "none" if density == 0 else f"{density:.3g}"


def _empty_table(title: str) -> Table:
    return Table(box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0), pad_edge=False, title=title, title_justify="left")


def _print(table: Table, file: IO[str]) -> None:
    width = Console().width
    if not file.isatty():  # a pipe has no width: as wide as the table needs
        plain = Console(width=10_000)
        width = max(width, Measurement.get(plain, plain.options, table).maximum)
    Console(file=file, width=width).print(table)
    print(file=file)


def _tables(rows: Iterable[dict]) -> dict[tuple, list[dict]]:
    """Rows by what a table has in common: everything but shape and peer; the duel stands alone."""
    found: dict[tuple, list[dict]] = {}
    for row in rows:
        found.setdefault((group(row), row["peer"] == "cpu"), []).append(row)
    return found


def _table(key: tuple, rows: list[dict], means: list[dict]) -> Table:
    common, duel = key
    title = " ".join([*(part for part in common if part and part != "none"), *(["GPU against CPU"] if duel else [])])
    table = _empty_table(title)
    peers = list(dict.fromkeys(row["peer"] for row in rows))
    by_shape: dict[tuple, list[dict]] = {}
    for row in rows:
        by_shape.setdefault(tuple(row["shape"]), []).append(row)
    lines = [_cells(members, peers) for members in by_shape.values()]
    for name, field in (("geometric mean", "ratio"), ("2048³ and above", "ratio_from_2048")):
        mean_of = {mean["peer"]: mean[field] for mean in means if group(mean) == common}
        if len(by_shape) > 1 and any(mean_of.get(peer) for peer in peers):
            lines.append({"M, N, K": name} | {_heading(peer, "ratio"): _ratio(mean_of.get(peer)) for peer in peers})
    shape = "M, K" if all(len(row["shape"]) == 2 for row in rows) else "M, N, K"
    # a column without a figure (the host's time on a CPU) is left out
    headings = [heading for heading in lines[0] if any(line.get(heading, _MISSING) != _MISSING for line in lines)]
    for heading in headings:
        title = shape if heading == "M, N, K" else heading
        table.add_column(title, justify="left" if heading in ("M, N, K", "tier") else "right")
    for line in lines:
        table.add_row(*(Text(line.get(heading, "")) for heading in headings), style="" if "tier" in line else "bold")
    return table


def _heading(peer: str, what: str) -> str:
    return f"{peer}\n{what}"


def _cells(rows: list[dict], peers: list[str]) -> dict[str, str]:
    """A line of the table, by heading: the rows of one shape, whose own figures are the same in all."""
    first, by_peer = rows[0], {row["peer"]: row for row in rows}
    wrong, share, error = not first["correct"], first["percent_of_ceiling"], first["error"]
    cells = {
        "M, N, K": ", ".join(map(str, first["shape"])),
        "tier": first["tier"],
        "µs": "WRONG" if wrong else _number(first["us"]),
        "p10-p90": _MISSING if wrong else f"{_number(first['us_p10'])}-{_number(first['us_p90'])}",
        "TFLOP/s": _number(first["tflops"]),
        "GB/s": _number(first["gbps"]),
        "of ceiling": _MISSING if share is None else f"{share:.1f} %",
    }
    for peer in peers:
        row = by_peer.get(peer, {})
        cells |= {_heading(peer, "µs"): _number(row.get("peer_us")), _heading(peer, "ratio"): _ratio(row.get("ratio"))}
    host = next((row["peer_host_us"] for row in rows if row["peer_host_us"]), None)
    both = first["host_us"] and host
    return cells | {
        "error": f"{error:.1e}" if error is not None else "failed" if first.get("failure") else "not finite",
        "host µs\nours / peer": f"{_number(first['host_us'])} / {_number(host)}" if both else _MISSING,
    }


def _number(value: float | None) -> str:
    if value is None:
        return _MISSING
    return f"{value:,.0f}" if value >= 999.5 else f"{value:.3g}"


def _ratio(value: float | None) -> str:
    return _MISSING if value is None else f"{value:.3f}x"


def _caption(rows: list[dict], ceiling: str | None) -> list[str]:
    lines = [_TIMERS[timer] for timer in dict.fromkeys(row["timer"] for row in rows) if timer in _TIMERS]
    lines.append("Ratio: the peer's time over ours, above 1 is faster. Error: ‖out - ref‖ / ‖ref‖ against float64.")
    if any(row["peer"].startswith("torch_eager") for row in rows):
        lines.append("torch_eager: F.linear and relu, two kernels in one graph; its launches cost more outside of one.")
    if any(row["peer"] == "cpu" for row in rows):
        lines.append("cpu: the same face on the CPU, one run, wall-clock time.")
    if ceiling:
        lines.append(f"Percent {ceiling}.")
    lines += dict.fromkeys(f"FAILED: {row['failure']}" for row in rows if row.get("failure"))
    if wrong := sum(not row["correct"] for row in rows):
        lines.append(f"WRONG: {wrong} rows of kernels whose output is not that of the reference; they are not timed.")
    return lines
