"""Runs in; the rows that were measured of them, and their picture, out."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qsparse import checkpoint
from qsparse.errors import UserError
from qsparse.report import flaw, newest, png
from qsparse.train.progress import say, shortest


@dataclass(frozen=True)
class Collected:
    """The newest row of each variant of the runs, by device, and the path of the picture of them."""

    rows: list[dict[str, Any]]
    picture: Path

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse report --json` prints."""
        return {"rows": self.rows, "png": str(self.picture)}


def collect(
    runs: Sequence[str | Path] = (), *, out: str | Path | None = None, console: Console | None = None
) -> Collected:
    """Read the rows of `runs` (none given: of every run under runs/) and draw them.

    out: the picture, a .png; left out, report.png in the run, or beside the runs when there are several. console: where
    it is said which runs have no rows.
    Raises UserError when there is no such run, no row in any, or `out` is not a .png or cannot be written.
    """
    named = [checkpoint.find_run(run) for run in runs] or checkpoint.runs() or [checkpoint.newest_run()]
    named = list({run.resolve(): run for run in named}.values())  # each once, however it is spelt
    picture = Path(out) if out is not None else _beside(named) / "report.png"
    if picture.suffix.lower() != ".png" or picture.is_dir():
        raise UserError(f"--out {picture} is no picture: give it a name that ends in .png")
    checkpoint.require_writable(picture.parent)
    rows = []
    for run in named:
        # The row keeps the name that the run had when it was measured; what counts here is where it is now.
        found = [{**row, "run": str(run)} for row in checkpoint.read_rows(run)]
        for number, row in enumerate(found, start=1):
            if wrong := flaw(row):
                raise UserError(
                    f"{run / checkpoint.ROWS}: line {number} is no row of qsparse's, {wrong}; delete that line"
                )
        if not found:
            say(console, f"{run}: nothing was measured yet")
        rows += found
    if not rows:
        raise UserError(
            f"nothing was measured yet in {', '.join(map(str, named))}: run `qsparse quantize` or `qsparse sparsify`"
        )
    rows = newest(rows)
    checkpoint.make_directory(picture.parent)
    return Collected(rows, png(rows, picture))


def _beside(runs: Sequence[Path]) -> Path:
    if len(runs) == 1:
        return runs[0]
    return shortest(os.path.commonpath([run.absolute().parent for run in runs]))
