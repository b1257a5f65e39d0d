"""A comparison of formats -> a table."""

from __future__ import annotations

import sys
from typing import IO, TYPE_CHECKING

from rich import box
from rich.console import Console
from rich.table import Table

if TYPE_CHECKING:
    from qsparse.sparse.compare import Comparison, Size


def show_sizes(comparison: Comparison, file: IO[str] | None = None) -> None:
    """Print one line a format: its bytes beside the dense array's, its break-even density, and its arrays."""
    shape = " x ".join(f"{size:,}" for size in comparison.shape)
    table = Table(
        box=box.SIMPLE_HEAD,
        padding=(0, 1, 0, 0),
        pad_edge=False,
        show_edge=False,
        title=f"{shape} {comparison.dtype}, density {comparison.density:g}: {comparison.nnz:,} entries",
        title_justify="left",
        caption="Break-even: the density below which the format is smaller than the dense array. Indices are int32.\n"
        "2:4 holds 2 of each 4 entries of a row, whatever the density. A network's bitmap lies in tiles, which take a "
        "little more; what fills the tiles of entries up is in their bytes, and not in their break-even.",
        caption_justify="left",
    )
    table.add_column("format", style="bold")
    for heading in ("bytes", "of dense", "break-even"):
        table.add_column(heading, justify="right")
    table.add_column("arrays", overflow="fold")
    for size in comparison.sizes:
        table.add_row(size.format, f"{size.bytes:,}", f"{100 * size.ratio:.1f} %", _break_even(size), _arrays(size))
    Console(file=file or sys.stdout).print(table)


def _break_even(size: Size) -> str:
    if size.break_even is None:
        return "-"
    return f"{size.break_even:.4f}" if size.break_even else "never"


def _arrays(size: Size) -> str:
    return ", ".join(f"{name} {count:,}" for name, count in size.arrays.items())
