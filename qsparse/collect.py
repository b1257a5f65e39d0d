"""Runs, sweeps and files of rows in; the rows that were measured, a picture and a page of them out."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from qsparse import checkpoint
from qsparse.errors import UserError
from qsparse.report import flaw, newest, png
from qsparse.report.inside import Insides
from qsparse.report.page import html as write_page
from qsparse.report.plot import require_picture
from qsparse.train.progress import say, shortest

_MODEL = "mlp"
"""The `op` of a row of a model; rows of other operations are of kernels."""


@dataclass(frozen=True)
class Collected:
    """The newest row of each variant of the runs, by device, the path of the picture of them, and of the page."""

    rows: list[dict[str, Any]]
    picture: Path
    page: Path | None = None

    def to_json(self) -> dict[str, Any]:
        """Return what `qsparse report --json` prints."""
        page = {} if self.page is None else {"html": str(self.page)}
        return {"rows": self.rows, "png": str(self.picture), **page}


def collect(
    runs: Sequence[str | Path] = (),
    *,
    out: str | Path | None = None,
    html: str | Path | None = None,
    console: Console | None = None,
) -> Collected:
    """Read the rows of `runs` (none given: of every run under runs/) and draw them.

    runs: run directories, directories of sweeps, and .jsonl files of rows; of those of kernels the page draws the
    roofline. out: the picture, a .png; left out, report.png in the run, or beside the runs when there are several.
    html: the page, an .html, for which the variants that lie in the runs are loaded too. console: where it is said
    which runs have no rows.
    Raises UserError when there is no such run, no row in any, or `out` or `html` is not named as what it is or cannot
    be written.
    """
    named = [_find(run) for run in runs] or checkpoint.runs() or [checkpoint.newest_run()]
    named = list({run.resolve(): run for run in named}.values())  # each once, however it is spelt
    picture = Path(out) if out is not None else _beside(named) / "report.png"
    require_picture(picture)
    page = None if html is None else Path(html)
    if page is not None and (page.suffix.lower() not in (".html", ".htm") or page.is_dir()):
        raise UserError(f"--html {page} is no page: give it a name that ends in .html")
    for file in filter(None, (picture, page)):
        checkpoint.require_writable(file.parent)
    rows, kernels, notes = [], [], []
    for run in named:
        models, others, failed = _rows_of(run)
        if failed:
            notes.append(f"{run}: {failed:,} cells failed; their errors are in its {checkpoint.ROWS}")
            say(console, notes[-1])
        if not models and not others:
            say(console, f"{run}: nothing was measured yet")
        rows += models
        kernels += others
    if not rows:
        raise UserError(
            f"nothing was measured yet in {', '.join(map(str, named))}: run `qsparse quantize` or `qsparse sparsify`"
        )
    rows = newest(rows)
    checkpoint.make_directory(picture.parent)
    png(rows, picture)
    if page is not None:
        checkpoint.make_directory(page.parent)
        insides = _look_inside(named, rows, notes, console)
        write_page(rows, page, kernels=kernels, insides=insides.variants, images=insides.images, notes=notes)
    return Collected(rows, picture, page)


def _find(run: str | Path) -> Path:
    """A run directory, a sweep's, or a file of rows. Raises UserError for anything else."""
    path = Path(run)
    if path.suffix == ".jsonl" and path.is_file():
        return path
    if (path / checkpoint.ROWS).is_file() and not (path / checkpoint.CONFIG).exists():
        return path
    return checkpoint.find_run(run)


def _rows_of(run: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]], int]:
    """The rows of models and of kernels in a place, and how many cells of a sweep failed there."""
    file = run if run.is_file() else run / checkpoint.ROWS
    is_run = (run / checkpoint.CONFIG).is_file()
    models: list[dict[str, Any]] = []
    kernels: list[dict[str, Any]] = []
    failed = 0
    for number, row in enumerate(checkpoint.read_rows(run), start=1):
        if "error" in row and "cell" in row:
            failed += 1
            continue
        # The row keeps the name that the run had when it was measured; what counts here is where it is now.
        parts = [row, *row.pop("peers", [])] if not is_run else [{**row, "run": str(run)}]
        for part in parts:
            if wrong := flaw(part):
                raise UserError(f"{file}: line {number} is no row of qsparse's, {wrong}; delete that line")
            (models if part.get("op", _MODEL) == _MODEL else kernels).append(part)
    return models, kernels, failed


def _look_inside(
    named: Sequence[Path], rows: Sequence[Mapping[str, Any]], notes: list[str], console: Console | None
) -> Insides:
    """What the page shows of the variants that lie in the runs; one that cannot be looked into is noted instead."""
    insides = Insides()
    for run in named:
        if not (run / checkpoint.MODEL).is_file():
            continue
        variants = dict.fromkeys(str(row["variant"]) for row in rows if row.get("run") == str(run))
        try:
            broken = insides.look(run, [variant for variant in variants if _lies_in(run, variant)])
            found = [f"{run / variant} is not shown: {error}" for variant, error in broken.items()]
        except UserError as error:
            found = [f"{run}: its models are not shown: {error}"]
        for note in found:
            say(console, note)
        notes += found
    return insides


def _lies_in(run: Path, variant: str) -> bool:
    """Whether the run has a directory of that variant, sound or not; simulations and libraries have none."""
    return (run / variant).parent == run and (run / variant).is_dir()


def _beside(runs: Sequence[Path]) -> Path:
    runs = [run for run in runs if run.is_dir()] or [runs[0].parent]  # a file of rows may lie anywhere
    if len(runs) == 1:
        return runs[0]
    return shortest(os.path.commonpath([run.absolute().parent for run in runs]))
